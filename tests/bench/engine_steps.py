# SPDX-License-Identifier: Apache-2.0
"""How long one step takes: decode at several widths, prompts at several lengths, and our own share of it.

    python -m tests.bench.engine_steps <package folder> [--profile <folder for the trace>]

Every figure is a median over `--repeats` runs, with the least beside it: on a shared machine the least is
nearer to what the code costs.
"""

import argparse
import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from server.engine.compute import runner as runner_module
from server.engine.compute.runner import Runner
from server.engine.compute.sampler import TopLogprobs
from server.engine.compute.threads import plan_threads
from server.engine.loop import EngineLoop
from server.engine.scheduler import Scheduler, SchedulerLimits
from server.engine.sequence import ForwardRow, Submission, TokenParams
from server.models.package import ModelPackage

PARAMS = TokenParams(temperature=0.7, top_k=0, top_p=0.95, min_p=0.0, seed=1, max_tokens=400, end_token_ids=())


class InstantRunner:
    """A model that answers at once, so that a step's time is ours alone."""

    def __init__(self, num_slots, num_tokens=49152, topk=64):
        self.num_tokens = num_tokens
        logits = np.random.default_rng(0).standard_normal((num_slots, num_tokens)) * 5
        full = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)
        ids = np.argsort(-full, axis=1, kind="stable")[:, :topk].copy()
        self.top = TopLogprobs(ids, np.take_along_axis(full, ids, axis=1), full)

    def forward(self, rows):
        return self.top

    def copy_rows(self, src, dst, num_tokens):
        pass


def time_of(action, repeats):
    """Median and least seconds of an action."""
    action()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds)), min(seconds)


def decode_rows(num_rows, context):
    return [ForwardRow(slot=slot, start=context, token_ids=[100 + slot]) for slot in range(num_rows)]


def show_decode(runner, args):
    alone = None
    for num_rows in args.rows:
        rows = decode_rows(num_rows, args.context)
        median, least = time_of(lambda rows=rows: runner.forward(rows), args.repeats)
        alone = alone or num_rows / median
        speed = num_rows / median
        print(
            f"decode {num_rows:3d} rows  {median * 1e3:7.2f} ms (least {least * 1e3:7.2f})"
            f"  {speed:6.0f} tok/s  {speed / alone:5.2f} x one row"
        )


def show_prefill(runner, args):
    for size in args.chunks:
        rows = [ForwardRow(slot=0, start=args.context, token_ids=[100] * size)]
        median, least = time_of(lambda rows=rows: runner.forward(rows), max(3, args.repeats // 4))
        print(
            f"prefill {size:4d} tokens {median * 1e3:7.2f} ms (least {least * 1e3:7.2f})"
            f"  {size / median:6.0f} tok/s"
        )


def show_overhead(args):
    for temperature in (0.0, PARAMS.temperature):
        for num_rows in (1, 16):
            limits = SchedulerLimits(max_num_seqs=num_rows)
            loop = EngineLoop(InstantRunner(num_rows), Scheduler(limits))
            for name in range(num_rows):
                params = replace(PARAMS, temperature=temperature, seed=name)
                loop.submit(Submission(request_id=str(name), token_ids=(5, 6, 7), params=params))
            loop.step()
            median, least = time_of(loop.step, 10 * args.repeats)
            print(
                f"our own share, {num_rows:2d} rows at temperature {temperature}: "
                f"{median * 1e3:.3f} ms a step (least {least * 1e3:.3f})"
            )


def show_profile(package, args):
    """Where a decode step's time goes, by operator."""
    options_of = runner_module._options

    def with_profile(*given, **named):
        options = options_of(*given, **named)
        options.enable_profiling = True
        options.profile_file_prefix = str(args.profile / "engine_steps")
        return options

    runner_module._options = with_profile
    runner = runner_of(package, args)
    for _ in range(args.repeats):
        runner.forward(decode_rows(args.rows[-1], args.context))
    events = json.loads(Path(runner._session.end_profiling()).read_text())
    spent, count = Counter(), Counter()
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("kernel_time"):
            spent[event["args"]["op_name"]] += event["dur"]
            count[event["args"]["op_name"]] += 1
    for name, micros in spent.most_common():
        print(f"{name:32s} {micros / args.repeats / 1e3:8.3f} ms  {count[name] / args.repeats:6.0f} nodes")


def runner_of(package, args):
    plan = plan_threads(asked=args.threads)
    return Runner(
        package,
        num_slots=max(args.rows),
        max_len=args.max_len,
        num_threads=plan.num_threads,
        can_spin=plan.can_spin and not args.no_spin,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, help="folder of a model package")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--chunks", type=int, nargs="*", default=[16, 32, 64, 128])
    parser.add_argument("--context", type=int, default=100, help="tokens already in each slot")
    parser.add_argument("--max-len", type=int, default=1024, help="tokens a slot holds")
    parser.add_argument("--threads", type=int, default=0, help="0: by the machine")
    parser.add_argument("--no-spin", action="store_true")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="show operators' times instead")
    args = parser.parse_args()
    package = ModelPackage.load(args.package)
    if args.profile:
        show_profile(package, args)
        return
    runner = runner_of(package, args)
    print(package.manifest.model_id, package.manifest.quantization, plan_threads(asked=args.threads).reason)
    show_decode(runner, args)
    show_prefill(runner, args)
    show_overhead(args)


if __name__ == "__main__":
    main()
