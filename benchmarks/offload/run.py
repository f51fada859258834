"""What does it cost to keep activations in host memory, and how many bytes are left on the devices?

1. Simulated, by the rates of a card that is not here: steps of large models with adapters (LoRA) on two cards of 24 GB.
2. Measured: the peaks of small transformers on two CPU workers, beside those that are predicted.
3. With `--device cuda:0`, and nothing else then: a Llama of 1.2 billion parameters on a card. `--device cpu` tries it.
"""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks import harness
from benchmarks.gpu.card import Card
from benchmarks.harness import Verdict
from benchmarks.offload import card, measured, simulated
from benchmarks.offload.model import ALL_TRAINED, IN_4_BITS, LLAMA_8B, QWEN_14B, Config

MODELS = {config.name: config for config in (LLAMA_8B, QWEN_14B, *IN_4_BITS, ALL_TRAINED)}
TINY = Config("tiny", 64, 128, 6, 4, 2, 96, head=16)


def main(argv: list[str] | None = None) -> None:
    options = harness.Options(__doc__)
    options.add_argument(
        "--models", nargs="+", choices=[*MODELS, TINY.name], default=list(MODELS), help="(default all)"
    )
    options.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384], help="of a row (default 4096 16384)")
    options.add_argument("--stages", type=int, nargs="+", default=[6, 12, 16], help="of each card (default 6 12 16)")
    options.add_argument("--rows", type=int, default=16, help="of a mini-batch, each a micro-batch (default 16)")
    options.add_amount("--iterations", 400, 20, "candidates of a plan")
    options.add_amount("--width", 64, 16, "of the small transformers")
    options.add_amount("--chunks", 8, 4, "their micro-batches")
    options.add_argument("--device", choices=["cuda:0", "cpu"], help="measures a Llama there, and nothing else")
    options.add_amount("--rounds", 6, 3, "of the Llama, at most")
    options.add_amount("--seconds", 12.0, 1.0, "about how long these rounds may take")
    arguments = options.parse_args(argv)
    name, results = "offload", dict[str, Any]()
    with harness.on_this_machine() as machine:
        if arguments.device is not None:
            name = "offload_card"
            verdicts = on_a_card(Card.of(arguments.device, None), arguments.rounds, arguments.seconds, results)
        else:
            for model in arguments.models:
                for tokens in arguments.tokens:
                    config = MODELS.get(model, TINY)
                    profile = simulated.profile_of(config, tokens, arguments.rows)
                    steps = [
                        simulated.step_of(profile, each, 2) for each in simulated.choices(config, arguments.stages)
                    ]
                    kept = simulated.optimizers(config)
                    plans = [simulated.planned(profile, 2, arguments.iterations, each) for each in kept]
                    steps += [plan for plan in plans if plan is not None]
                    title = f"{model}, {arguments.rows} x {tokens} tokens"
                    simulated.report(title, steps)
                    print("the planner finds nothing that fits\n" if None in plans else "")
                    results[title] = [asdict(step) for step in steps]
            width, settings = arguments.width, measured.SETTINGS
            if arguments.quick:
                settings = [each for each in settings if each.stages > 1]
            peaks = {each: measured.measure(each, width, 2 * width, arguments.chunks) for each in settings}
            verdicts = measured.report(peaks)
            results["measured"] = {str(each): asdict(found) for each, found in peaks.items()}
    harness.conclude(name, arguments, machine, verdicts, results)


def on_a_card(where: Card, rounds: int, seconds: float, results: dict[str, Any]) -> list[Verdict]:
    """Prints what the Llama took."""
    found = card.run(where, rounds, seconds)
    if found is None:
        return []
    outcome, verdicts = found
    results |= {"card": where.facts(), **asdict(outcome)}
    rows = [
        [name, f"{1e3 * median(each.seconds):.1f}", f"{each.gib:.2f}", f"{each.difference}"]
        for name, each in outcome.measured.items()
    ]
    harness.print_table(["", "ms", "GiB", "gradients apart by"], rows)
    return [*verdicts, Verdict("ways that failed", len(outcome.errors), 0, "")]


if __name__ == "__main__":
    main()
