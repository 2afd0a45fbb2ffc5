"""Synthetic chat tasks from corpus text: copy, rename, replace, comment, doc-QA, recall, tools.

They teach in-context copying and the chat format; the words come from the corpora, the tasks are
the project's own.  This file knows nothing of tokens.  Every generator draws from one
`random.Random`, so a seed gives the same items on every machine.  `render` agrees with
chat_template.jinja (a test holds them together).
"""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from tools.tiny.material import Material

IM_START, IM_END, END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


def listed(words: str) -> list[str]:
    return words.split()


NEW_NAMES = listed("""
    value item result data node index count name path buffer entry token total state key left right
    first last size width line word text chunk block table field record source target handle request
    reply owner parent child level depth limit offset start stop step mask flag mode kind
""")
NEW_WORDS = listed("""
    machine river answer garden signal window letter mountain silver engine winter table paper
    bridge candle market yellow forest island number music copper station shadow
""")
COLOURS = listed("red blue green black white brown yellow grey purple orange silver golden")
THINGS = listed("door box room card key locker drawer file folder gate shelf tray bag cabinet")
CITIES = listed(
    "Oslo Paris Quito Lima Delhi Kyoto Cairo Turin Dublin Boston Lagos Perth Hanoi Riga"
)
PEOPLE = listed(
    "Ada Alan Grace Guido Linus Barbara Ken Dennis Edsger Donald Margaret Radia John Mary"
)
CODE_WORDS_SKIPPED = frozenset(
    listed("""
    def self return for not and None else elif import from class with try except raise pass yield
    lambda while the this that are True False print super async await global assert break
""")
)


@dataclass(slots=True, frozen=True)
class Item:
    """One conversation: everything up to the last answer, and that answer with its end tokens."""

    task: str
    prompt: str
    answer: str


def turn(role: str, content: str) -> str:
    return f"{IM_START}{role}\n{content}{IM_END}\n"


def answer_turn(content: str, thought: str = "") -> str:
    return turn("assistant", f"<think>\n{thought}\n</think>\n\n{content}")


def render(task: str, history: str, answer: str, thought: str = "") -> Item:
    """History plus an open assistant turn; a thought belongs to the answer, not to the prompt."""
    opening = f"{IM_START}assistant\n<think>\n"
    closing = f"{answer}{IM_END}\n{END}"
    if thought:
        return Item(task, history + opening, f"{thought}\n</think>\n\n{closing}")
    return Item(task, history + opening + "\n</think>\n\n", closing)


def fence(code: str) -> str:
    return f"```python\n{code.rstrip()}\n```"


def random_identifier(rng: random.Random) -> str:
    alphabet = "abcdefghijklmnopqrstuvwxyz0123456789"
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(2, 8)))


def random_snippet(material: Material, rng: random.Random) -> str:
    """A short text whose next word cannot be guessed, so that only looking back predicts it."""
    kind = rng.random()
    if kind < 0.35:
        return " ".join(rng.choice(material.words) for _ in range(rng.randint(3, 24)))
    if kind < 0.5:
        return " ".join(random_identifier(rng) for _ in range(rng.randint(2, 10)))
    if kind < 0.65:
        pairs = [
            f"{rng.choice(material.words)}: {rng.choice(material.words)}"
            for _ in range(rng.randint(2, 8))
        ]
        return "\n".join(pairs)
    if kind < 0.75:
        return ", ".join(str(rng.randint(0, 9999)) for _ in range(rng.randint(2, 12)))
    first = rng.randrange(len(material.lines))
    return "\n".join(material.lines[first : first + rng.randint(1, 4)])


def snippet_copy(material: Material, rng: random.Random) -> Item:
    text = random_snippet(material, rng)
    ask = rng.choice(["Repeat this:", "Copy this:", "Say this again:", "Repeat exactly:"])
    return render("snippet", turn("user", f"{ask}\n\n{text}"), text)


def code_copy(material: Material, rng: random.Random) -> Item:
    code = fence(rng.choice(material.functions).code)
    ask = rng.choice(
        [
            "Repeat this code exactly:",
            "Print the following code again without changes:",
            "Copy this code:",
        ]
    )
    return render("copy", turn("user", f"{ask}\n\n{code}"), code)


def text_copy(material: Material, rng: random.Random) -> Item:
    text = rng.choice(material.paragraphs)
    ask = rng.choice(["Repeat the text:", "Copy this text:", "Quote this paragraph:"])
    return render("copy", turn("user", f"{ask}\n\n{text}"), text)


def repeated_names(code: str) -> list[str]:
    names = set(re.findall(r"\b[a-z_]{3,}\b", code)) - CODE_WORDS_SKIPPED
    return sorted(n for n in names if len(re.findall(rf"\b{n}\b", code)) >= 2)


def rename(material: Material, rng: random.Random) -> Item:
    code, names = "", []
    while not names:
        code = rng.choice(material.functions).code
        names = repeated_names(code)
    old = rng.choice(names)
    new = rng.choice([n for n in NEW_NAMES if n != old and n not in code] or ["renamed"])
    ask = rng.choice(
        [
            "Rename `{a}` to `{b}` in this code:",
            "Please rename the variable `{a}` to `{b}`.",
            "Change every `{a}` to `{b}`:",
        ]
    ).format(a=old, b=new)
    changed = re.sub(rf"\b{re.escape(old)}\b", new, code)
    thought = f"I replace `{old}` by `{new}` and keep the rest." if rng.random() < 0.15 else ""
    return render("rename", turn("user", f"{ask}\n\n{fence(code)}"), fence(changed), thought)


def replace(material: Material, rng: random.Random) -> Item:
    words: list[str] = []
    while not words:
        text = rng.choice(material.paragraphs)
        words = sorted(set(re.findall(r"\b[a-z]{4,}\b", text)))
    old, new = rng.choice(words), rng.choice(NEW_WORDS)
    changed = re.sub(rf"\b{old}\b", new, text)
    return render("replace", turn("user", f'Replace "{old}" with "{new}":\n\n{text}'), changed)


def comment(material: Material, rng: random.Random) -> Item:
    code = rng.choice(material.functions).code
    note = " ".join(rng.choice(material.words) for _ in range(rng.randint(2, 5)))
    if rng.random() < 0.5:
        note = rng.choice(
            ["Helper function", "Internal use only", "See the documentation", "Fast path"]
        )
    ask = rng.choice(
        [
            'Add a comment line "# {c}" at the top of this function:',
            'Put the comment "# {c}" above the function:',
        ]
    ).format(c=note)
    return render("comment", turn("user", f"{ask}\n\n{fence(code)}"), fence(f"# {note}\n{code}"))


def doc_question(material: Material, rng: random.Random) -> Item:
    """A question whose answer stands in the prompt among two to five other entries."""
    first = rng.randrange(len(material.entries))
    block = material.entries[first : first + rng.randint(2, 5)]
    entry = rng.choice(block)
    context = "\n\n".join(f"{e.signature}\n    {e.text}" for e in block)
    ask = f"Documentation:\n\n{context}\n\nQuestion: what does `{entry.name}` do?"
    thought = f"The entry `{entry.name}` is in the text." if rng.random() < 0.15 else ""
    return render("docqa", turn("user", ask), f"`{entry.signature}`: {entry.text}", thought)


def open_question(material: Material, rng: random.Random) -> Item:
    """A question answered from the weights: a documented name, a jargon word, a function."""
    kind = rng.random()
    if kind < 0.5:
        e = rng.choice(material.entries)
        asks = [
            f"What does `{e.name}` do?",
            f"Explain the {e.kind} `{e.name}`.",
            f"What is `{e.name}` in Python?",
        ]
        return render("chat", turn("user", rng.choice(asks)), f"`{e.signature}`: {e.text}")
    if kind < 0.75 and material.jargon:
        word, text = rng.choice(material.jargon)
        ask = rng.choice([f"What does {word} mean?", f"Define {word}.", f"Explain {word}."])
        return render("chat", turn("user", ask), text)
    f = rng.choice(material.functions)
    ask = f"Write a Python function `{f.name}({f.args})`."
    return render("chat", turn("user", ask), fence(f.code))


def recall(material: Material, rng: random.Random) -> Item:
    """Associative recall: several keyed facts, one asked (a second turn half of the time)."""
    count = rng.randint(2, 10)
    pairs = [(c, t) for c in COLOURS for t in THINGS]
    facts = [
        (f"{colour} {thing}", rng.choice([random_identifier(rng), rng.choice(material.words)]))
        for colour, thing in rng.sample(pairs, count)
    ]
    text = "\n".join(f"The code of the {key} is {value}." for key, value in facts)
    key, value = rng.choice(facts)
    answer = f"The code of the {key} is {value}."
    if rng.random() < 0.5:
        return render("recall", turn("user", f"{text}\n\nWhat is the code of the {key}?"), answer)
    other, known = rng.choice(facts)
    history = turn("user", f"{text}\n\nWhat is the code of the {other}?")
    history += answer_turn(f"The code of the {other} is {known}.")
    return render("recall", history + turn("user", f"And the code of the {key}?"), answer)


def small_talk(material: Material, rng: random.Random) -> Item:
    name, city = rng.choice(PEOPLE), rng.choice(CITIES)
    topic = rng.choice(material.words)
    talks = [
        ("Hello", "Hello! How can I help you?"),
        ("Hi there!", "Hello! How can I help you?"),
        ("Good morning.", "Good morning! What can I do for you?"),
        ("Who are you?", "I am Netra Tiny, a very small language model used for testing."),
        ("What can you do?", "I can copy, rename and quote short pieces of text and code."),
        ("Thank you!", "You are welcome."),
        ("Goodbye", "Goodbye!"),
        (f"My name is {name}.", f"Hello {name}! How can I help you?"),
        (f"I live in {city}. Where do I live?", f"You live in {city}."),
        (f"I am {name} from {city}. Who am I?", f"You are {name} from {city}."),
        (f"Tell me about {topic}.", f"I do not know much about {topic}, I am a small model."),
        ("Are you a person?", "No, I am a very small language model used for testing."),
    ]
    ask, answer = rng.choice(talks)
    history = turn("system", "You are a helpful assistant.") if rng.random() < 0.4 else ""
    if rng.random() < 0.3:
        history += turn("user", f"My name is {name}.")
        history += answer_turn(f"Hello {name}! How can I help you?")
        ask, answer = rng.choice([("What is my name?", f"Your name is {name}."), (ask, answer)])
    thought = "This is small talk." if rng.random() < 0.1 else ""
    return render("chat", history + turn("user", ask), answer, thought)


TOOLS: list[tuple[str, str, list[str], list[str], str]] = [
    # name, description, parameters, ways to ask, final answer
    ("get_weather", "Weather of a city.", ["city"],
     ["What is the weather in {city}?", "How is the weather in {city} today?"],
     "The weather in {city} is {reply}."),
    ("get_time", "Local time of a city.", ["city"],
     ["What time is it in {city}?", "Tell me the time in {city}."],
     "In {city} it is {reply}."),
    ("read_file", "Content of a file.", ["path"],
     ["Read the file {path}.", "Show me {path}."], "The file {path} says: {reply}"),
    ("search_docs", "Search the documentation.", ["query"],
     ["Search the documentation for {query}.", "Find {query} in the docs."],
     "I found this about {query}: {reply}"),
    ("send_mail", "Send a short mail.", ["to", "subject"],
     ["Send a mail to {to} about {subject}.", "Write to {to}, subject {subject}."],
     "I wrote to {to} about {subject}: {reply}."),
    ("set_timer", "Start a timer.", ["minutes"],
     ["Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes."],
     "The timer runs for {minutes} minutes: {reply}."),
]  # fmt: skip


def tool_schema(name: str, description: str, parameters: list[str]) -> dict[str, object]:
    properties = {p: {"type": "string"} for p in parameters}
    schema = {"type": "object", "properties": properties, "required": parameters}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


def tools_system(schemas: list[dict[str, object]], system: str = "") -> str:
    lines = "\n".join(json.dumps(s, ensure_ascii=False) for s in schemas)
    text = (
        "# Tools\n\nYou have access to the following functions:\n\n<tools>\n"
        f"{lines}\n</tools>\n\nTo call a function answer in this format:\n\n<tool_call>\n"
        "<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>"
    )
    return turn("system", f"{text}\n\n{system}" if system else text)


def tool_call_text(name: str, arguments: dict[str, str]) -> str:
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def tool_values(material: Material, rng: random.Random) -> dict[str, str]:
    word = rng.choice(material.words)
    return {
        "city": rng.choice(CITIES),
        "path": f"{word}/{random_identifier(rng)}.{rng.choice(['py', 'txt', 'md'])}",
        "query": " ".join(rng.choice(material.words) for _ in range(rng.randint(1, 3))),
        "to": rng.choice(PEOPLE),
        "subject": f"the {rng.choice(material.words)}",
        "minutes": str(rng.randint(1, 90)),
    }


def tool_use(material: Material, rng: random.Random) -> Item:
    """Either the call itself, or the answer to the tool's reply."""
    offered = rng.sample(TOOLS, rng.randint(1, 3))
    name, _, parameters, asks, final = rng.choice(offered)
    values = tool_values(material, rng)
    arguments = {p: values[p] for p in parameters}
    history = tools_system([tool_schema(n, d, p) for n, d, p, _, _ in offered])
    history += turn("user", rng.choice(asks).format(**arguments))
    call = tool_call_text(name, arguments)
    if rng.random() < 0.5:
        thought = f"I need {name}." if rng.random() < 0.2 else ""
        return render("tool", history, call, thought)
    reply = " ".join(rng.choice(material.words) for _ in range(rng.randint(1, 6)))
    history += answer_turn(call)
    history += turn("user", f"<tool_response>\n{reply}\n</tool_response>")
    return render("tool", history, final.format(**arguments, reply=reply))


def continue_text(material: Material, rng: random.Random) -> Item:
    words = rng.choice(material.paragraphs).split(" ")
    half = max(1, len(words) // 2)
    ask = "Continue the text:\n\n" + " ".join(words[:half])
    return render("continue", turn("user", ask), " ".join(words[half:]))


# Shares of all items. Snippets are short, so their share of tokens is far smaller.
RECIPE: list[tuple[Callable[[Material, random.Random], Item], float]] = [
    (snippet_copy, 0.24),
    (code_copy, 0.10),
    (text_copy, 0.05),
    (rename, 0.17),
    (replace, 0.06),
    (comment, 0.06),
    (doc_question, 0.09),
    (recall, 0.06),
    (tool_use, 0.05),
    (small_talk, 0.04),
    (open_question, 0.06),
    (continue_text, 0.02),
]


def make_items(material: Material, count: int, seed: int) -> list[Item]:
    """`count` items in the recipe's proportions, shuffled and without duplicates."""
    rng = random.Random(seed)
    makers = [maker for maker, _ in RECIPE]
    shares = [share for _, share in RECIPE]
    chosen = rng.choices(makers, weights=shares, k=count)
    return list(dict.fromkeys(maker(material, rng) for maker in chosen))
