"""Trains a small drafter on what collect.py noted, and writes it in Hugging Face layout for `drafter_checkpoint`.

    python -m tools.drafters.train eagle3 --out .cache/drafters/eagle3 --steps 400

A run that was stopped goes on from its last state. The last part of the data is held out, and its share of right
guesses per position is printed: acceptance itself is measured by bench/offline.py.
"""

import argparse
import json
import math
import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from tools.drafters.collect import PLACES
from tools.drafters.dflash import Dflash
from tools.drafters.eagle3 import Eagle3
from tools.drafters.target import Data, Target
from tools.tiny.optimizer import Optimizer

Drafter = Eagle3 | Dflash
HELD_OUT = 32
WARMUP = 20


def build(method: str, target: Target, data: Data, draft_vocab: int) -> Drafter:
    """A fresh drafter. The mask is the token that only ends documents."""
    if method == "eagle3":
        return Eagle3(target, PLACES, data.commonest(draft_vocab))
    return Dflash(target, PLACES, mask_token_id=0)


def factor(step: int, num_steps: int) -> float:
    """Of the learning rate: a short rise, then half a cosine."""
    return min(1.0, (step + 1) / WARMUP) * (0.5 + 0.5 * math.cos(math.pi * step / num_steps))


def export(model: Drafter, directory: Path) -> None:
    """config.json and model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(model.config(), indent=1) + "\n")
    tensors = {name: tensor.contiguous() for name, tensor in model.tensors().items()}
    save_file(tensors, directory / "model.safetensors")


def held_out(model: Drafter, data: Data, prompt_len: int) -> list[float]:
    """Share of right guesses per position on conversations that were not trained on."""
    torch.manual_seed(0)
    with torch.no_grad():
        _, right = model.loss(data.tokens.long(), data.states.float(), prompt_len)
    return [round(share, 3) for share in right.tolist()]


def train(model: Drafter, data: Data, args: argparse.Namespace) -> None:
    """Steps up to args.steps, from the saved state if there is one."""
    optimizer = Optimizer(model.named_parameters(), args.adam_rate, args.muon_rate, torch.float32)
    path, step = args.out / "state.pt", 0
    if path.exists():
        state = torch.load(path, weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]

    def save() -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)

    with tqdm(total=args.steps, initial=step, unit="step") as bar:
        while step < args.steps:
            generator = torch.Generator().manual_seed(step)
            torch.manual_seed(step)
            tokens, states = data.batch(args.rows, generator)
            loss, right = model.loss(tokens, states, args.prompt_len)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step(factor(step, args.steps))
            step += 1
            bar.update()
            bar.set_postfix(loss=f"{loss.item():.3f}", first=f"{right[0].item():.3f}")
            if step % args.save_steps == 0:
                save()
    save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("method", choices=("eagle3", "dflash"))
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/netra-tiny"))
    parser.add_argument("--data", type=Path, default=Path(".cache/drafters/data"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rows", type=int, default=4, help="conversations in a step")
    parser.add_argument("--prompt-len", type=int, default=96, help="as in collect.py")
    parser.add_argument("--draft-vocab", type=int, default=2048, help="of eagle3")
    parser.add_argument("--adam-rate", type=float, default=2e-3)
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--save-steps", type=int, default=50)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    data = Data.load(args.data)
    kept = Data(data.tokens[-HELD_OUT:], data.states[-HELD_OUT:])
    data = Data(data.tokens[:-HELD_OUT], data.states[:-HELD_OUT])
    model = build(args.method, Target.load(args.checkpoint), data, args.draft_vocab)
    args.out.mkdir(parents=True, exist_ok=True)
    print(f"held out, untrained: {held_out(model, kept, args.prompt_len)}")
    train(model, data, args)
    print(f"held out, trained: {held_out(model, kept, args.prompt_len)}")
    export(model, args.out)


if __name__ == "__main__":
    main()
