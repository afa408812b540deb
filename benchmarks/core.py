"""Un-patched `generate` against fastgen, in one process and interleaved; writes a table and the raw figures.

    python benchmarks/core.py                                                    # the default model, some minutes
    python benchmarks/core.py --requests 4 --max-output 8 --output smoke         # does it run?

What is measured, for each dtype:

* W32 (see workload.py): un-patched, as left-padded batches of requests sorted by output length, for each batch size;
  `fastgen.generate` on the same requests. Only tokens that were asked for count.
* SINGLE: four requests one after another, `model.generate` un-patched and patched.
* the seconds of `patch()`.
* the time of a step near the start and near the end of one long generation, less the time in the attention backend.
* the share of tokens equal to those of the un-patched batches, and of the un-patched batch sizes among themselves:
  rounding differs with the shape of a batch, and random prompts make near ties frequent.

A fixed matrix product and a memory copy are timed before and after each contender. Where one is off its median over the
run by more than 20%, the machine was not the same for all, and the table says so.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from workload import Request, padded_batches, single, w32

import fastgen

DRIFT = 0.2
LONG_PROMPT, WINDOW = 16, 32
Tokens = dict[int, list[int]]


def main() -> None:
    args = parse()
    model = load(args.model, args.device)
    requests = w32(args.requests, args.max_output)
    report: dict[str, Any] = {"about": about(args, model), "dtypes": {}}
    models = {name: copy.deepcopy(model).to(getattr(torch, name)) for name in args.dtypes}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in args.dtypes}
    tokens: dict[str, dict[str, Tokens]] = {name: {} for name in args.dtypes}
    for name, model in models.items():
        warm_up(model)
        for round_ in range(args.rounds):
            for label, contender in contenders(model, requests, args.batch_sizes, backwards=round_ % 2 == 1):
                run, tokens[name][label] = measure(label, contender, model.device)
                runs[name].append(run)
                print(
                    f"{name:>9}  {label:<28} {run['seconds']:8.2f} s  {run['tokens_per_second']:8.1f} tokens/s",
                    flush=True,
                )
    for name, model in models.items():
        report["dtypes"][name] = {
            "runs": runs[name],
            "equal": equal(tokens[name], args.batch_sizes),
            "long": long_generation(model, min(args.long_tokens, args.max_output or args.long_tokens)),
        }
    flag_drift([run for name in args.dtypes for run in runs[name]])
    for results in report["dtypes"].values():
        results["summary"] = summarize(results["runs"])
    page = markdown(report)
    print(f"\n{page}")
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_name(output.name + ".json").write_text(json.dumps(report, indent=1) + "\n")
    output.with_name(output.name + ".md").write_text(page)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model name or folder; default: SmolLM2-135M-Instruct of the extra 'demo'")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[8, 16, 32])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--requests", type=int, default=32, help="cut the workload to its first requests")
    parser.add_argument("--max-output", type=int, help="cut every output to this many tokens")
    parser.add_argument("--long-tokens", type=int, default=2020, help="tokens of the one long generation")
    parser.add_argument("--output", default="benchmarks/results/core", help="results go to OUTPUT.json and OUTPUT.md")
    return parser.parse_args()


def load(name: str | None, device: str) -> Any:
    if name is None:
        from fastgen.demo import load_default

        model, _ = load_default()
    else:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    model.generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    return model.to(device)


# Contenders


def contenders(
    model: Any, requests: list[Request], batch_sizes: list[int], backwards: bool
) -> list[tuple[str, Callable[[], tuple[float, Tokens, dict[str, Any]]]]]:
    """Label and function of each contender; a function returns seconds, tokens by request, and what else it saw."""

    def unpatched(chosen: list[Request], size: int) -> tuple[float, Tokens, dict[str, Any]]:
        fastgen.unpatch(model)
        seconds, tokens = timed(lambda: run_batches(model, chosen, size), model.device)
        return seconds, tokens, {}

    def patched(run: Callable[[], Tokens]) -> tuple[float, Tokens, dict[str, Any]]:
        fastgen.unpatch(model)
        patch_seconds, _ = timed(lambda: fastgen.patch(model), model.device)
        seconds, tokens = timed(run, model.device)
        status = fastgen.status(model)
        fastgen.unpatch(model)
        packed = status.last_call is not None and status.last_call.reason == "packed"
        path = "packed" if packed else f"not packed: {status.reason}; last call: {status.last_call}"
        return seconds, tokens, {"patch_seconds": patch_seconds, "path": path, "counters": status.counters}

    def helper() -> Tokens:
        outputs = [request.output for request in requests]
        results = fastgen.generate(model, [request.prompt for request in requests], max_new_tokens=outputs)
        return {index: result.token_ids for index, result in enumerate(results)}

    entries: list[tuple[str, Callable[[], tuple[float, Tokens, dict[str, Any]]]]] = [
        (unpatched_label(size), lambda size=size: unpatched(requests, size)) for size in batch_sizes
    ]
    entries.append(("W32 fastgen.generate", lambda: patched(helper)))
    few = single(requests)
    entries.append(("SINGLE un-patched", lambda: unpatched(few, 1)))
    entries.append(("SINGLE patched", lambda: patched(lambda: run_batches(model, few, 1))))
    return entries[::-1] if backwards else entries


def unpatched_label(size: int) -> str:
    return f"W32 un-patched, batch {size}"


def run_batches(model: Any, requests: list[Request], size: int) -> Tokens:
    """``model.generate`` on left-padded batches of ``size``."""
    tokens = {}
    for batch in padded_batches(requests, size) if size > 1 else [[index] for index in range(len(requests))]:
        longest = max(len(requests[index].prompt) for index in batch)
        pads = [longest - len(requests[index].prompt) for index in batch]
        ids = [[0] * pad + requests[index].prompt for pad, index in zip(pads, batch, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in pads]
        output = model.generate(
            input_ids=torch.tensor(ids, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            max_new_tokens=max(requests[index].output for index in batch),
        )
        for index, row in zip(batch, output.tolist(), strict=True):
            tokens[index] = row[longest : longest + requests[index].output]
    return tokens


def warm_up(model: Any) -> None:
    few = [Request(request.prompt, 2) for request in w32(2)]
    run_batches(model, few, 2)
    fastgen.patch(model)
    run_batches(model, few, 2)
    fastgen.unpatch(model)


def measure(label: str, contender: Callable[[], tuple[float, Tokens, dict[str, Any]]], device: torch.device) -> Any:
    """One run of a contender with a probe of the machine on both sides."""
    before = probe(device)
    seconds, tokens, more = contender()
    after = probe(device)
    count = sum(map(len, tokens.values()))
    run = {"contender": label, "seconds": seconds, "tokens": count, "tokens_per_second": count / seconds}
    return {**run, **more, "probes": [before, after]}, tokens


def timed(function: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


# The machine


def probe(device: torch.device) -> dict[str, float]:
    """A matrix product in GFLOP/s and a memory copy in GB/s, medians of a few."""
    n, size = 768, 2**24
    a, b = torch.ones(n, n, device=device), torch.ones(n, n, device=device)
    source, target = torch.ones(size, device=device), torch.empty(size, device=device)

    def median(function: Callable[[], Any]) -> float:
        function()
        return statistics.median(timed(function, device)[0] for _ in range(7))

    return {
        "gflops": 2 * n**3 / median(lambda: a @ b) / 1e9,
        "gbytes_per_second": 2 * 4 * size / median(lambda: target.copy_(source)) / 1e9,
    }


def flag_drift(runs: list[dict[str, Any]]) -> None:
    """Note in each run how far its probes are off the median of all."""
    for figure in ("gflops", "gbytes_per_second"):
        middle = statistics.median(probe[figure] for run in runs for probe in run["probes"])
        for run in runs:
            off = max(abs(probe[figure] / middle - 1) for probe in run["probes"])
            run["drift"] = max(run.get("drift", 0.0), off)


def about(args: argparse.Namespace, model: Any) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if args.device.startswith("cuda") else None
    return {
        "command": command(args),
        "date": time.strftime("%Y-%m-%d"),
        "model": f"{model_name(args.model)}, {model.num_parameters() / 1e6:.0f}M parameters",
        "machine": {
            "processor": processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": gpu,
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": {
            "fastgen": fastgen.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def model_name(name: str | None) -> str:
    """The name as others may know it: of a folder, only its last part."""
    if name is None:
        return "SmolLM2-135M-Instruct"
    return Path(name).resolve().name if Path(name).is_dir() else name


def command(args: argparse.Namespace) -> str:
    parts = ["python benchmarks/core.py"]
    if args.model is not None:
        parts.append(f"--model {model_name(args.model)}")
    parts.append(f"--device {args.device} --dtypes {' '.join(args.dtypes)}")
    parts.append(f"--batch-sizes {' '.join(map(str, args.batch_sizes))} --rounds {args.rounds}")
    parts.append(f"--requests {args.requests} --long-tokens {args.long_tokens}")
    if args.max_output is not None:
        parts.append(f"--max-output {args.max_output}")
    return " ".join(parts)


def processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


# One long generation


class Stopwatch:
    """A streamer that notes when each token came, and the time spent in attention until then."""

    def __init__(self, backend: Any) -> None:
        self.ends: list[float] = []
        self.attention: list[float] = []
        self._spent = 0.0
        self._backend = backend

    def __enter__(self) -> Stopwatch:
        for name in ("write", "attend"):
            setattr(self._backend, name, self._watched(getattr(self._backend, name)))
        return self

    def __exit__(self, *error: object) -> None:
        for name in ("write", "attend"):
            delattr(self._backend, name)

    def put(self, tokens: torch.Tensor) -> None:
        self.ends.append(time.perf_counter())
        self.attention.append(self._spent)

    def end(self) -> None:
        pass

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._spent += time.perf_counter() - start
            return result

        return watched


def long_generation(model: Any, length: int) -> dict[str, float] | None:
    """Milliseconds of a step near token 10 and near the end, medians over a few steps; only where rows are packed."""
    fastgen.patch(model)
    runner = getattr(model.generate.engine, "runner", None)
    if runner is None:
        fastgen.unpatch(model)
        return None
    ids = torch.tensor([w32(1)[0].prompt[:LONG_PROMPT]], device=model.device)
    with Stopwatch(runner.backend) as watch:
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, streamer=watch)
    fastgen.unpatch(model)
    steps = [b - a for a, b in zip(watch.ends, watch.ends[1:], strict=False)]
    inside = [b - a for a, b in zip(watch.attention, watch.attention[1:], strict=False)]
    first = min(10, len(steps) - 1)
    early = slice(first, first + WINDOW)
    late = slice(max(len(steps) - WINDOW, 0), None)

    def median(values: list[float]) -> float:
        return 1000 * statistics.median(values)

    rest = [step - attention for step, attention in zip(steps, inside, strict=True)]
    return {
        "tokens": length,
        "early_step_ms": median(steps[early]),
        "early_rest_ms": median(rest[early]),
        "late_step_ms": median(steps[late]),
        "late_rest_ms": median(rest[late]),
    }


# The report


def equal(tokens: dict[str, Tokens], batch_sizes: list[int]) -> dict[str, dict[str, float]]:
    """Share of equal tokens, and of equal sequences, between contenders on W32."""
    first, *others = [unpatched_label(size) for size in batch_sizes]
    pairs = [(unpatched_label(size), "W32 fastgen.generate") for size in batch_sizes]
    pairs += [(first, other) for other in others]
    pairs.append(("SINGLE un-patched", "SINGLE patched"))
    return {f"{a} / {b}": _equal(tokens[a], tokens[b]) for a, b in pairs}


def _equal(a: Tokens, b: Tokens) -> dict[str, float]:
    same = sum(x == y for index in a for x, y in zip(a[index], b[index], strict=True))
    return {
        "tokens": same / sum(map(len, a.values())),
        "sequences": sum(a[index] == b[index] for index in a) / len(a),
    }


def summarize(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Medians over the rounds; a ratio compares with the best un-patched contender of the same benchmark."""
    summary: dict[str, dict[str, Any]] = {}
    for label in dict.fromkeys(run["contender"] for run in runs):
        mine = [run for run in runs if run["contender"] == label]
        summary[label] = {
            "seconds": statistics.median(run["seconds"] for run in mine),
            "tokens_per_second": statistics.median(run["tokens_per_second"] for run in mine),
            "drift": max(run["drift"] for run in mine),
        }
        summary[label]["path"] = mine[-1].get("path", "original")
        patching = [run["patch_seconds"] for run in mine if "patch_seconds" in run]
        if patching:
            summary[label]["patch_seconds"] = statistics.median(patching)
    for label, entry in summary.items():
        benchmark = label.partition(" ")[0]
        best = min(e["seconds"] for other, e in summary.items() if other.startswith(f"{benchmark} un-patched"))
        entry["ratio"] = best / entry["seconds"]
    return summary


def markdown(report: dict[str, Any]) -> str:
    info = report["about"]
    machine, versions = info["machine"], info["versions"]
    lines = [
        "# Core benchmark",
        "",
        f"* {info['model']}; {info['date']}",
        f"* {machine['gpu'] or machine['processor']}, {machine['cores']} cores, {machine['threads']} threads",
        "* " + ", ".join(f"{name} {version}" for name, version in versions.items()),
        f"* `{info['command']}`",
        "",
        "Ratios compare with the best un-patched contender of the same benchmark.",
        "",
        "| dtype | contender | seconds | tokens/s | ratio | path | machine |",
        "|---|---|---:|---:|---:|---|---|",
    ]
    for name, results in report["dtypes"].items():
        for label, entry in results["summary"].items():
            steady = f"**drifted {entry['drift']:.0%}**" if entry["drift"] > DRIFT else f"within {entry['drift']:.0%}"
            lines.append(
                f"| {name} | {label} | {entry['seconds']:.2f} | {entry['tokens_per_second']:.1f} "
                f"| {entry['ratio']:.2f} | {entry['path']} | {steady} |"
            )
    lines += ["", "| dtype | compared | equal tokens | equal sequences |", "|---|---|---:|---:|"]
    for name, results in report["dtypes"].items():
        for pair, shares in results["equal"].items():
            lines.append(f"| {name} | {pair} | {shares['tokens']:.1%} | {shares['sequences']:.1%} |")
    lines += [
        "",
        "One long generation, milliseconds a step; *rest* is the step without the attention backend.",
        "",
        "| dtype | patch() seconds | near token 10 | rest | near token N | rest | N |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, results in report["dtypes"].items():
        long = results["long"]
        patching = statistics.median(run["patch_seconds"] for run in results["runs"] if "patch_seconds" in run)
        names = ("early_step_ms", "early_rest_ms", "late_step_ms", "late_rest_ms")
        cells = (
            [f"{long[figure]:.1f}" for figure in names] + [str(long["tokens"])] if long else ["not packed"] + [""] * 4
        )
        lines.append(f"| {name} | {patching:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
