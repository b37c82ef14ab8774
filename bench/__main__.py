"""``python -m bench``: run workloads, print their ratios, keep the results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.registry import Registry, UnknownWorkloadError, Workload, load_workloads
from bench.report import Result, render, write_json
from bench.runner import DEFAULT_REPEATS, QUICK_REPEATS, RESULTS, run


def main(arguments: Sequence[str] | None = None, registry: Registry | None = None) -> int:
    options = _parser().parse_args(arguments)
    registry = registry or load_workloads()
    console = Console()
    try:
        selected = registry.select(options.workloads)
    except UnknownWorkloadError as error:
        print(f"bench: {error.args[0]}", file=sys.stderr)
        return 2
    if options.list:
        width = max(len(each.name) for each in selected)
        for each in selected:
            console.print(f"{each.name:<{width}}  {each.description}", soft_wrap=True, highlight=False)
        return 0
    results = []
    for each in selected:
        usual = QUICK_REPEATS if options.quick else each.repeats or DEFAULT_REPEATS
        repeats = options.repeat or usual
        result = _run(each, repeats, options.quick, console)
        console.print(render(result))
        results.append(result)
        if options.json is None and not options.quick:
            write_json(result.to_dict(), RESULTS / f"{each.name}.json")
    if options.json is not None:
        write_json([result.to_dict() for result in results], options.json)
    return 0


def _run(workload: Workload, repeats: int, quick: bool, console: Console) -> Result:
    with console.status(workload.name) as status:
        return run(
            workload,
            repeats=repeats,
            quick=quick,
            progress=lambda done: status.update(f"{workload.name}: pass {done + 1} of {repeats}"),
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure lancewal against its peers. The ratio is ours ÷ peer; results of a full run "
        "are kept in bench/results/, one file per workload.",
    )
    parser.add_argument(
        "workloads",
        nargs="*",
        metavar="workload",
        help="which to run, or the first word of some names; all by default",
    )
    parser.add_argument("--list", action="store_true", help="list the workloads and stop")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results here instead")
    parser.add_argument("--repeat", type=_positive, metavar="N", help=f"passes ({DEFAULT_REPEATS})")
    parser.add_argument(
        "--quick", action="store_true", help=f"small sizes, {QUICK_REPEATS} pass, nothing kept unless --json"
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of passes")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
