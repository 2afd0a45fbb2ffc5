"""The client examples, run as a user runs them, against the real server."""

import subprocess
import sys

import pytest
from server_tools import ROOT, Server

pytestmark = pytest.mark.server


def run(name: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "client_examples" / name), *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_stream_shows_the_text_and_what_it_cost(idle: Server):
    done = run("stream.py", "--url", idle.grpc_url, "--prompt", "the rain", "--max-tokens", "12")
    assert done.returncode == 0, done.stderr
    expected = idle.ask("netra", text_input="the rain", parameters={"max_tokens": 12}).text
    assert done.stdout.startswith(expected)
    assert "tokens/s]" in done.stdout


def test_stream_reports_an_error(idle: Server):
    done = run("stream.py", "--url", idle.grpc_url, "--max-tokens", "0")
    assert done.returncode == 1
    assert "[invalid_request] max_tokens=0" in done.stderr


def test_chat_sends_the_whole_conversation(idle: Server):
    options = ("--url", idle.grpc_url, "--max-tokens", "8", "--temperature", "0")
    said = run("chat.py", *options, "--message", "hello", "--message", "again")
    assert said.returncode == 0, said.stderr
    assert said.stdout.count("assistant> ") == 2
    typed = run("chat.py", *options, stdin="hello\nagain\n")
    assert typed.returncode == 0, typed.stderr
    answers = [text.partition("you> ")[0] for text in said.stdout.split("assistant> ")[1:]]
    typed_answers = [text.partition("you> ")[0] for text in typed.stdout.split("assistant> ")[1:]]
    assert [text.strip() for text in answers] == [text.strip() for text in typed_answers]
    alone = run("chat.py", *options, "--message", "again")
    assert alone.stdout.partition("assistant> ")[2].strip() != answers[1].strip()


def test_many_users_are_all_served(idle: Server):
    options = ("--url", idle.grpc_url, "--users", "6", "--max-tokens", "10")
    done = run("many_users.py", *options)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:7]]
    assert [row[0] for row in rows] == ["10"] * 6
    assert "6 users, 60 tokens in" in done.stdout


def test_cancel_frees_the_request(idle: Server):
    metrics = f"http://127.0.0.1:{idle.ports.metrics}/metrics"
    done = run("cancel.py", "--url", idle.grpc_url, "--metrics", metrics, "--responses", "5")
    assert done.returncode == 0, done.stderr
    assert "[cancelled after 5 responses]" in done.stdout
    assert "[no request running" in done.stdout
