# SPDX-License-Identifier: Apache-2.0
"""`sampan model`: add, list, show, check and remove model packages."""

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from server.models.package import (
    QUANTIZATIONS,
    PackageError,
    data_home,
    find_package,
    list_packages,
    remove_package,
)

if TYPE_CHECKING:  # annotations only: what builds is loaded when something is built
    from collections.abc import Iterator

    from server.models.package import ModelPackage

NAME = "model"
HELP = "add, list, show, check and remove models"
EPILOG = """examples:
  sampan model add smollm2-135m-instruct             a model of the catalogue, in the default quantisation
  sampan model add smollm2-135m-instruct -q fp32     without any rounding: slower, for comparison
  sampan model add ./my-model.gguf --as my-bot       your own GGUF file, served under the name my-bot
  sampan model add hf:HuggingFaceTB/SmolLM2-360M-Instruct
  sampan model list
  sampan model check smollm2-135m-instruct           measure again how close it is to its source
quantisations: w8a8 (default, fastest), w8, w4 (smallest), fp32 (exact)
"""
Report = Callable[[str, int, int], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verbs and their flags."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="add|list|show|check|rm")
    add = verbs.add_parser("add", help="fetch, convert and check a model")
    add.add_argument("source", help="a catalogue name, FILE.gguf, a folder, or hf:ORG/REPO[@REVISION]")
    add.add_argument("--as", dest="model_id", help="serve it under this name")
    add.add_argument("--force", action="store_true", help="build it again although it is there")
    add.add_argument("--no-check", action="store_true", help="do not measure it against its source")
    verbs.add_parser("list", help="the packages on this machine, and the catalogue")
    for named_verb, text in (
        ("show", "everything about one package"),
        ("check", "verify the files and measure the model again"),
        ("rm", "delete a package"),
    ):
        named = verbs.add_parser(named_verb, help=text)
        named.add_argument("model_id", help="the package's name")
    verbs.choices["rm"].add_argument("--yes", action="store_true", help="do not ask")
    for verb in verbs.choices.values():
        verb.add_argument(
            "--home", type=Path, help="folder of models (default: SAMPAN_HOME or ~/.local/share/sampan)"
        )
    for name in ("add", "show", "check", "rm"):
        verbs.choices[name].add_argument(
            "-q", "--quantization", choices=QUANTIZATIONS, default="w8a8", help="(%(default)s)"
        )


def run(args: argparse.Namespace) -> int:
    """Do what was asked; every expected fault is one line on standard error."""
    home = args.home or data_home(os.environ)
    actions: dict[str, Callable[[argparse.Namespace, Path], int]] = {
        "add": _add,
        "list": _list,
        "show": _show,
        "check": _check,
        "rm": _remove,
    }
    try:
        return actions[args.verb](args, home)
    except PackageError as error:
        print(f"sampan model: {error}", file=sys.stderr)
        return 1


def ensure_package(
    source: str, quantization: str, home: Path, *, model_id: str | None = None
) -> "ModelPackage":
    """Return the package, fetched and built first if it is not there; shows how far it is.

    Raises:
        PackageError: it cannot be had; the message says why.
    """
    from server.models.build import build_package  # noqa: PLC0415  # loads ONNX: only when something is built
    from server.models.readers.checkpoint import CheckpointError  # noqa: PLC0415  # as above
    from server.models.source.files import SourceError  # noqa: PLC0415  # as above
    from server.models.source.resolve import open_source  # noqa: PLC0415  # as above

    with _progress() as report:
        try:
            found = open_source(source, home, os.environ, report)
            return build_package(
                found.checkpoint,
                model_id=model_id or found.model_id,
                quantization=quantization,
                home=home,
                source=found.origin,
                report=report,
            )
        except (SourceError, CheckpointError) as error:
            raise PackageError(str(error)) from error


def _add(args: argparse.Namespace, home: Path) -> int:
    model_id = args.model_id
    known = model_id or args.source
    if not args.force and "/" not in known and not Path(args.source).exists() and _is_there(home, known, args):
        print(f"{known} ({args.quantization}) is there already; --force builds it again")
        return 0
    package = ensure_package(args.source, args.quantization, home, model_id=model_id)
    manifest = package.manifest
    name = f"{manifest.model_id} ({manifest.quantization})"
    print(f"added {name}, {manifest.num_bytes >> 20} MiB: {_closeness(package)}")
    print(f"serve it with: sampan serve --model {manifest.model_id} --quantization {manifest.quantization}")
    return 0


def _is_there(home: Path, model_id: str, args: argparse.Namespace) -> bool:
    try:
        find_package(home, model_id, args.quantization)
    except PackageError:
        return False
    return True


def _list(_args: argparse.Namespace, home: Path) -> int:
    from rich.console import Console  # noqa: PLC0415  # a table is worth its import, help is not
    from rich.table import Table  # noqa: PLC0415  # as above

    from server.models.source.catalogue import CATALOGUE  # noqa: PLC0415  # loads the readers

    table = Table(title=f"models in {home}")
    for column in ("model", "quantisation", "MiB", "context", "perplexity / source"):
        table.add_column(column)
    packages = list_packages(home)
    for package in packages:
        if isinstance(package, PackageError):
            table.add_row("[red]damaged[/red]", "", "", "", str(package))
            continue
        manifest = package.manifest
        table.add_row(
            manifest.model_id,
            manifest.quantization,
            str(manifest.num_bytes >> 20),
            str(manifest.shape.context_length),
            f"{manifest.fidelity.get('perplexity_ratio', float('nan')):.4f}",
        )
    console = Console()
    console.print(table)
    there = {package.manifest.model_id for package in packages if not isinstance(package, PackageError)}
    for entry in CATALOGUE.values():
        if entry.model_id not in there:
            console.print(f"can be added: {entry.model_id}  {entry.title}, {entry.license}, {entry.languages}")
    return 0


def _show(args: argparse.Namespace, home: Path) -> int:
    print(find_package(home, args.model_id, args.quantization).manifest.to_json(), end="")
    return 0


def _check(args: argparse.Namespace, home: Path) -> int:
    from server.models.check import measure_package  # noqa: PLC0415  # loads ONNX Runtime

    package = find_package(home, args.model_id, args.quantization, verify="sha256")
    report = measure_package(package, None)
    print(f"{args.model_id} ({args.quantization}): all {len(package.manifest.files)} files are whole")
    for text in report.texts:
        source = package.manifest.fidelity.get(f"reference_perplexity_{text.name}")
        beside = f", fp32 source {source:.3f}" if source else ""
        print(f"  {text.name:8} {text.num_tokens:4} tokens  perplexity {text.perplexity:.3f}{beside}")
    if report.ratio is None:
        print("  no figures of its source are stored; build it again with a check to compare")
        return 0
    print(f"  ratio to the fp32 source {report.ratio:.4f}, limit {report.limit}")
    if not report.is_good:
        print(
            "sampan model: the package is beyond its limit; build it again or choose another", file=sys.stderr
        )
    return 0 if report.is_good else 1


def _remove(args: argparse.Namespace, home: Path) -> int:
    find_name = f"{args.model_id} ({args.quantization})"
    if not args.yes and not _agrees(f"delete {find_name} from {home}?"):
        print("nothing was deleted")
        return 1
    num_bytes = remove_package(home, args.model_id, args.quantization)
    print(f"deleted {find_name}, {num_bytes >> 20} MiB")
    return 0


def _agrees(question: str) -> bool:
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _closeness(package: "ModelPackage") -> str:
    ratio = package.manifest.fidelity.get("perplexity_ratio")
    return "not checked" if ratio is None else f"{ratio:.4f} times the perplexity of its source"


@contextmanager
def _progress() -> "Iterator[Report]":
    """A bar for each stage on a terminal, a line for each stage elsewhere."""
    from rich.console import Console  # noqa: PLC0415  # only long work pays for it
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415  # as above

    console = Console(stderr=True)
    tasks: dict[str, object] = {}
    columns = (TextColumn("{task.description:>12}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as progress:

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
                if not console.is_terminal:
                    print(f"{stage} …", file=sys.stderr, flush=True)
            progress.update(tasks[stage], completed=done, total=total)  # type: ignore[arg-type]  # a TaskID

        yield report
