"""The commands of `effgpu`, from `info` to `bench`. Each imports only what it needs."""

import argparse
import contextlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from effgpu import __version__
from effgpu.errors import BadArgument, Refusal

if TYPE_CHECKING:
    from effgpu.diagnosing.diagnosis import Diagnosis
    from effgpu.predicting.prediction import Prediction
    from effgpu.predicting.timeline import Timeline

SUCCEEDED, FAILED, REFUSED, EXCEEDED, UNCLEAR, INTERRUPTED, UNREAD = 0, 1, 2, 3, 4, 130, 141
_OF_A_MODEL = ("length", "lora", "four_bits", "checkpointing", "optimizer", "precision")
_TARGET_HELP = "a training script as it is, after --, as in -- python train.py --batch 12; or a function of a file"
_BEFORE_A_PREDICTION = """\
effgpu: runs {} up to its third step. It writes no weights and changes no file that is there; new files are its own"""
_BEFORE_A_DIAGNOSIS = """\
effgpu: runs {} for some steps. It writes no weights and changes no file that is there; new files are its own"""
_BEFORE_A_TRAINING = """\
effgpu: trains {} for some hundred steps, some of them altered. The weights that it trains are thrown away, and no \
file that is there changes. Before, it is run for some steps to predict what is not measured"""
_QUESTIONS = {  # an example of each command, and what it answers
    "effgpu predict --gpu T4 -- python train.py": "Will my script fit a GPU, and how long will a step take there?",
    "effgpu doctor --gpu T4 -- python train.py": "What holds my training back, and what would each change save?",
    "effgpu bench 'python train.py' 'python train.py --bf16'": "Is a change faster, and by how much?",
    "effgpu run": "What does each technique of the course bring on this machine?",
    "effgpu report one.json other.json": "How do machines compare?",
    "effgpu info": "What does this machine support?",
    "effgpu calibrate": "How fast is this GPU, for all predictions of it from now on?",
}
_WITHOUT_GPU = """
No GPU that CUDA can use. Every lesson still runs on this CPU. Saved bytes and FLOPs are the same on all CPUs. Memory is
counted, with what this CPU's kernels take. Times are this CPU's, and stored results of GPUs are drawn beside them.
Missing: energy, tensor cores, TF32, fp8 and a GPU's fused kernels."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Returns the exit code.

    0: success; of `predict`, that the step fits or no GPU was named. 1: a lesson, a script or a benched command failed.
    2: bad arguments or files, a step that cannot be predicted, or no GPU to calibrate. 3: more time or memory than
    `bench` allows, or than a GPU of `predict` has. 4: it may not fit, or the intervals of `bench` do not tell.
    130: Ctrl-C. 141: nobody reads the output to its end, as of a program that SIGPIPE ends.
    """
    try:
        try:
            return _main(arguments)
        finally:
            if sys.stdout:
                sys.stdout.flush()
    except BrokenPipeError:
        nothing = os.open(os.devnull, os.O_WRONLY)  # for what is flushed at the end of Python
        for stream in filter(None, (sys.stdout, sys.stderr)):
            os.dup2(nothing, stream.fileno())
        return UNREAD


def _main(arguments: list[str] | None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        chosen = _parser().parse_args(_variant_last(arguments))
    except _Misunderstood as error:
        if _asks_for_json(arguments):
            _print_failed(str(error))
        raise SystemExit(REFUSED) from error
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `kill` ends all that was started, as Ctrl-C does
    try:
        _check_files(chosen)
        if len(several := _find_variants(arguments)) > 1:
            raise _Exit(REFUSED, f"{arguments[0]}: expected one FILE.py:VARIANT, got {' and '.join(several)}")
        return chosen.command(chosen)
    except _Exit as end:
        code, text = end.args
        print(f"effgpu: error: {text}", file=sys.stderr)
    except KeyboardInterrupt:
        code, text = INTERRUPTED, "interrupted"
    if getattr(chosen, "json", None) == "-" and "printed" not in chosen:
        _print_failed(text)
    return code


def _print_failed(why: str) -> None:
    """What stands on standard output where JSON was asked for, and there is no result."""
    print(json.dumps({"failed": why}, indent=2, ensure_ascii=False))


def _asks_for_json(arguments: Sequence[str]) -> bool:
    """Whether `--json -` is among arguments that argparse does not understand."""
    words = [*itertools.takewhile("--".__ne__, arguments)]
    return "--json=-" in words or ("--json", "-") in itertools.pairwise(words)


class _Misunderstood(Exception):
    """What argparse says of arguments."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        print(f"{self.prog}: error: {message}", file=sys.stderr)
        raise _Misunderstood(message)


class _Exit(Exception):
    """The end of a command: the exit code, and in one line what is wrong."""


def _variant_last(arguments: list[str]) -> list[str]:
    """The arguments, with FILE.py:VARIANT behind the --, where its own follow: argparse takes them together."""
    found = _find_variants(arguments)
    if not found or "--" not in arguments:
        return arguments
    end = arguments.index("--")
    rest = [word for word in arguments[:end] if word not in found]
    return [*rest, "--", *found, *arguments[end + 1 :]]


def _find_variants(arguments: list[str]) -> list[str]:
    """Each FILE.py:VARIANT that `predict` or `doctor` is given, and not the function's file behind the --."""
    if arguments[:1] not in (["predict"], ["doctor"]):
        return []
    return [word for word in itertools.takewhile("--".__ne__, arguments) if re.search(r"\.py:\w*$", word)]


def _check_files(chosen: argparse.Namespace) -> None:
    """Refuse files that could not be written in the end, and one that would overwrite another."""
    named = {f"--{name}": getattr(chosen, name, None) for name in ("json", "trace", "plot")}
    files = {option: Path(name) for option, name in named.items() if name and name != "-"}
    for option, file in files.items():
        makes_folders = option == "--json" and chosen.command is _bench
        if not _can_write(file.resolve(), makes_folders):
            raise _Exit(REFUSED, f"{option}: expected a file that can be written, in a folder that exists, got {file}")
    if len({file.resolve() for file in files.values()}) < len(files):
        got = " and ".join(map(str, files.values()))
        raise _Exit(REFUSED, f"{' and '.join(files)}: expected a file for each, got {got}")


def _can_write(file: Path, makes_folders: bool) -> bool:
    """Whether a file can be written. One that is not there is made for that, and taken away again."""
    try:
        if file.exists():
            return not file.is_dir() and os.access(file, os.W_OK)
        folder = next(each for each in file.parents if each.exists()) if makes_folders else file.parent
        if folder != file.parent:
            return folder.is_dir() and os.access(folder, os.W_OK)
        file.touch()
        file.unlink()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _refusing(*errors: type[Exception]) -> Iterator[None]:
    """Refuse, in one line, where such an error says so."""
    try:
        yield
    except errors as error:
        lines = "; ".join([str(error), *getattr(error, "__notes__", ())])
        raise _Exit(REFUSED, " ".join(lines.split())) from error


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="effgpu", description="Measure what a training technique does to time, memory and energy.")
    parser.add_argument("--version", action="version", version=f"effgpu {__version__}")
    parser.set_defaults(command=_answers)
    commands = parser.add_subparsers()

    info = commands.add_parser("info", help="show this machine and what it supports")
    info.set_defaults(command=_info)

    _add_run(commands.add_parser("run", help="run lessons on this machine and write a report"))

    report = commands.add_parser("report", help="write a report from the results files of one or more machines")
    report.add_argument("results", nargs="+", type=Path, metavar="RESULTS.json")
    report.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="default: %(default)s")
    report.set_defaults(command=_report)

    predict_help = "predict whether a training step fits a GPU, and its time, without having one"
    predict = commands.add_parser("predict", help=predict_help)
    _add_predict(predict)
    doctor = commands.add_parser("doctor", help="say what holds a training step back, and what each change would save")
    _add_doctor(doctor)
    for one in (predict, doctor):
        _add_model(one.add_argument_group("a model of transformers, by its name, in place of a script"))
        one.add_argument("--json", metavar="FILE", help="write the result there; - is standard output, without table")
        trace_help = "write the predicted timeline of one step there, for ui.perfetto.dev"
        one.add_argument("--trace", type=Path, metavar="FILE", help=trace_help)

    calibrate = commands.add_parser("calibrate", help="measure this GPU, for predictions of its times from now on")
    calibrate.set_defaults(command=_calibrate)

    _add_bench(commands.add_parser("bench", help="compare training scripts as they are, in turns"))
    return parser


def _add_run(run: argparse.ArgumentParser) -> None:
    run.add_argument("lessons", nargs="*", metavar="LESSON", help="02, dataloader, 02_dataloader or a path; else all")
    run.add_argument("--out", type=Path, metavar="DIR", help="folder of the results (out; out/look with --seconds)")
    run.add_argument("--inplace", action="store_true", help="also store the outputs in the lessons that succeeded")
    seconds_help = "most seconds of a measurement: for a quick look, not for results"
    run.add_argument("--seconds", type=float, metavar="S", help=seconds_help)
    once_help = "lessons that run at once, and take turns on the GPU; default: 1"
    run.add_argument("--at-once", type=int, default=1, metavar="N", help=once_help)
    budget_help = "share out so long, such as 450s or 10m, then stop and say what was left out"
    run.add_argument("--budget", type=duration, default=math.inf, metavar="TIME", help=budget_help)
    missing_help = "only lessons that store outputs of other code or, on a GPU, of another device"
    run.add_argument("--missing", action="store_true", help=missing_help)
    run.set_defaults(command=_run)


def _add_predict(predict: argparse.ArgumentParser) -> None:
    predict.add_argument("words", nargs="*", metavar="COMMAND | FILE.py:VARIANT", help=_TARGET_HELP)
    gpu_help = 'such as T4, "A100 80 GB" or "16 GiB", once or more; else all that are known'
    predict.add_argument("--gpu", action="append", metavar="GPU", help=gpu_help)
    predict.add_argument("--samples", type=int, metavar="N", help="samples of an epoch, to tell its time")
    predict.add_argument("--batch", type=int, metavar="B", help="samples of a step, with --samples or --model")
    taken_help = "the share from 0 to 1 that a boolean index takes; else what is known, or half"
    predict.add_argument("--taken", type=float, metavar="SHARE", help=taken_help)
    price_help = "of an hour, to tell what an epoch of --samples costs, with --model"
    predict.add_argument("--price", type=float, metavar="P", help=price_help)
    predict.set_defaults(command=_predict)


def _add_doctor(doctor: argparse.ArgumentParser) -> None:
    doctor.add_argument("words", nargs="*", metavar="COMMAND | FILE.py:VARIANT", help=_TARGET_HELP)
    loader_help = "what gives batches of a function's step, by its name in the same file: then the step takes a batch"
    doctor.add_argument("--loader", metavar="NAME", help=loader_help)
    doctor.add_argument("--gpu", metavar="GPU", help="predict all for this one; else this machine's, or a T4")
    doctor.add_argument("--batch", type=int, metavar="B", help="samples of a step, with --model")
    doctor.set_defaults(command=_doctor)


def _add_model(model: argparse._ArgumentGroup) -> None:
    model_help = "a name on the Hugging Face Hub, or a folder with a config.json; no weights are downloaded"
    model.add_argument("--model", metavar="NAME", help=model_help)
    model.add_argument("--length", type=int, metavar="TOKENS", help="of each text; default: 512, or all it takes")
    lora_help = "train adapters of this rank, 8 where none is given, in place of the weights"
    model.add_argument("--lora", type=int, nargs="?", const=8, metavar="RANK", help=lora_help)
    model.add_argument("--4bit", dest="four_bits", action="store_true", help="frozen weights in 4 bits, with --lora")
    model.add_argument("--checkpointing", action="store_true", help="compute activations again, do not keep them")
    model.add_argument("--optimizer", metavar="NAME", help="adamw (default), sgd, momentum or adafactor")
    model.add_argument("--precision", metavar="NAME", help="mixed (default), pure (16 bits), tf32 or fp32")


def _add_bench(bench: argparse.ArgumentParser) -> None:
    bench.add_argument("commands", nargs="*", metavar="COMMAND", help="such as 'python train.py --bf16', in quotes")
    bench.add_argument("--name", action="append", default=[], metavar="LABEL=COMMAND", help="a command with its label")
    ref_help = "a commit in which to run the one command, after --; at least twice"
    bench.add_argument("--ref", action="append", default=[], metavar="COMMIT", help=ref_help)
    bench.add_argument("--seconds", type=float, default=5.0, metavar="S", help="most of each command; default: 5")
    bench.add_argument("--precision", type=percentage, metavar="1%", help="interval to aim at; CPU: 3%%, GPU: 1%%")
    bench.add_argument("--skip", type=int, default=5, metavar="STEPS", help="first steps, not timed; default: 5")
    bench.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="longest wait for a step; default: 300"
    )
    bench.add_argument("--unit", default="items", help="what items are, such as tokens")
    seeds_help = "train each command with so many seeds, which stand for {seed} in it, and compare the losses, too"
    bench.add_argument("--seeds", type=int, metavar="N", help=seeds_help)
    bench.add_argument("--until", type=int, metavar="STEP", help="with --seeds: the last step; else the script's end")
    bench.add_argument("--until-loss", type=float, metavar="LOSS", help="with --seeds: also compare the time to it")
    control_help = "a row more: the baseline against its own copy, the noise of this machine"
    bench.add_argument("--control", action="store_true", help=control_help)
    bench.add_argument("--one-at-a-time", action="store_true", help="restart the commands for their turns")
    bench.add_argument("--logs", type=Path, metavar="DIR", help="folder for the commands' output; else a temporary one")
    bench.add_argument("--json", metavar="FILE", help="store the result; - is standard output, without table")
    bench.add_argument("--plot", type=Path, metavar="FILE", help="draw the result, as PNG, SVG or PDF")
    bench.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    slower_help = "exit with code 3 if all of the interval is slower by more than this, and with 4 if a part of it is"
    bench.add_argument("--fail-if-slower", type=percentage, metavar="5%", help=slower_help)
    memory_help = "exit with code 3 if the peak memory is larger by more than this"
    bench.add_argument("--fail-if-more-memory", type=percentage, metavar="10%", help=memory_help)
    bench.set_defaults(command=_bench)


def percentage(text: str) -> float:
    """A share of 1 from a percentage: "5%" or "5". argparse shows the function's name: invalid percentage value."""
    number = float(text.strip().removesuffix("%"))
    if not 0 <= number < math.inf:
        raise ValueError
    return number / 100


def duration(text: str) -> float:
    """Seconds from "450s", "450" or "7.5m". argparse shows the function's name: invalid duration value."""
    number, minutes = text.strip().removesuffix("s"), 1
    if number.endswith("m"):
        number, minutes = number.removesuffix("m"), 60
    if not 0 < float(number) < math.inf:
        raise ValueError
    return float(number) * minutes


def _answers(chosen: argparse.Namespace) -> int:
    """What `effgpu` alone prints: the questions, each with the command that answers it."""
    for command, question in _QUESTIONS.items():
        print(f"{question}\n    {command}\n")
    print("effgpu COMMAND --help says what else it takes.")
    return SUCCEEDED


def _info(chosen: argparse.Namespace) -> int:
    from effgpu.measuring.device import describe
    from effgpu.units import format_bytes

    device = describe()
    facts = {"device": device.label, "memory": format_bytes(device.memory), "CPU cores": device.cores}
    if device.kind == "cuda":
        facts["compute capability"] = ".".join(map(str, device.capability or ["unknown"]))
        facts["multiprocessors"] = device.multiprocessors
        facts["driver"] = device.driver or "unknown: NVML does not answer"
    for title, rows in {"": facts, "supports": device.supports, "versions": device.versions}.items():
        if title and rows:
            print(f"\n{title}")
        for name, value in rows.items():
            print(f"{name:20}{value}")
    if device.kind == "cpu":
        print(_WITHOUT_GPU)
    return SUCCEEDED


def _run(chosen: argparse.Namespace) -> int:
    from effgpu import units
    from effgpu.course import runner
    from effgpu.measuring import timing
    from effgpu.measuring.device import describe

    needed = ("nbclient", "ipykernel", "matplotlib", "torchvision", "transformers", "datasets", "accelerate")
    if missing := [name for name in needed if not find_spec(name)]:
        raise _Exit(REFUSED, f"running lessons needs more: pip install {' '.join(missing)}")
    with _refusing(OSError, ValueError):
        if chosen.seconds is not None:
            units.check_positive(**{"--seconds": chosen.seconds})
        capped = chosen.seconds is not None or timing.cap_seconds(math.inf) < math.inf
        out = chosen.out or Path("out/look" if capped else "out")  # a quick look must not replace results
        lessons = runner.find_lessons(chosen.lessons)
        units.check_positive(Integral, **{"--at-once": chosen.at_once})
        if chosen.at_once > 1 and not capped and describe().kind != "cuda":
            raise ValueError(
                "--at-once: on a CPU, lessons that run at once slow each other down: expected 1 or --seconds"
            )
        if chosen.missing:
            lessons = [path for path in lessons if runner.is_missing(path, describe())]
            if not lessons:
                print("every lesson stores outputs of its code")
                return SUCCEEDED
        if chosen.inplace and describe().kind == "cpu" and (kept := runner.lessons_of_gpus(lessons)):
            raise ValueError(f"--inplace: {kept[0]} stores a GPU's outputs, which a CPU's would replace: say --missing")
        if chosen.inplace and capped:
            raise ValueError("--inplace stores results, but --seconds or EFFGPU_SECONDS cuts measurements short")
        runner.prepare(out, *{lesson.parent for lesson in lessons if chosen.inplace})
    outcomes, interrupted = [], False
    width = max(len(lesson.stem) for lesson in lessons)
    try:
        options = {name: getattr(chosen, name) for name in ("inplace", "at_once", "budget", "seconds")}
        for outcome in runner.run(lessons, out, **options):
            outcomes.append(outcome)  # stored at once, so that an interruption loses no results
            outcomes[-1] = runner.store(outcome, out / "results", outcomes[:-1])
            runner.show_line(f"{outcome.name:{width}}  {outcome.seconds:4.0f} s  {runner.tell(outcomes[-1])}")
    except KeyboardInterrupt:
        interrupted = True
    return _sum_up(outcomes, len(lessons), out, interrupted)


def _write_page(outcomes: list, out: Path) -> Path:
    """Write the report, with the lessons of earlier runs of this machine in the same folder."""
    from effgpu.course import report, runner
    from effgpu.measuring.device import describe

    device = describe()
    lessons = {
        earlier.name: earlier
        for earlier in runner.read_lessons(out / "notebooks")
        if all(comparison.device.slug == device.slug for comparison in earlier.comparisons)
    }
    lessons |= {outcome.name: outcome for outcome in outcomes}
    section = report.Section(device, tuple(lessons[name] for name in sorted(lessons)))
    return report.write(out / "report.html", [section])


def _sum_up(outcomes: list, asked: int, out: Path, interrupted: bool) -> int:
    from effgpu.course.runner import OUT_OF_TIME

    left_out = [outcome for outcome in outcomes if outcome.failure == OUT_OF_TIME]
    outcomes = [outcome for outcome in outcomes if outcome not in left_out]
    failed = {outcome.name: outcome.failure for outcome in outcomes if outcome.failure}
    summary = f"{len(outcomes) - len(failed)} of {asked} lessons ran without an error"
    if left_out:
        stopped = {each.name: f" (stopped after {each.seconds:.0f} s)" * (each.seconds > 0) for each in left_out}
        print(f"left out, as the time was over: {', '.join(map(''.join, stopped.items()))}")
    try:
        summary += f": {_write_page(outcomes, out)}"
    except OSError as error:  # for example a full disk
        failed["the report"] = error
    for name, failure in failed.items():
        print(f"failed: {name}: {failure}", file=sys.stderr)
    if interrupted:
        print(f"interrupted: {asked - len(left_out) - len(outcomes)} of {asked} lessons were not run", file=sys.stderr)
    print(summary)
    return INTERRUPTED if interrupted else FAILED if failed else SUCCEEDED


def _report(chosen: argparse.Namespace) -> int:
    if not find_spec("matplotlib"):
        raise _Exit(REFUSED, "a report needs more: pip install matplotlib")
    from effgpu import results
    from effgpu.course import report

    if chosen.out.resolve() in [path.resolve() for path in chosen.results]:
        raise _Exit(REFUSED, f"--out: expected a file for the report, got the results file {chosen.out}")
    with _refusing(OSError, ValueError):
        machines = {path: results.load(path) for path in chosen.results}
        if empty := [str(path) for path, comparisons in machines.items() if not comparisons]:
            raise ValueError(f"{', '.join(empty)}: expected comparisons, got none")
        page = report.write(chosen.out, [report.from_results(comparisons) for comparisons in machines.values()])
    print(page)
    return SUCCEEDED


def _predict(chosen: argparse.Namespace) -> int:
    from effgpu.predicting.predict import predict
    from effgpu.units import align, check_positive

    how = _check_asked(chosen, "predict", not_with_a_model=("taken", "trace"), only_with_a_model=("price",))
    if chosen.model:
        return _predict_model(chosen, how)
    epoch = {"--samples": chosen.samples, "--batch": chosen.batch}
    given = {option: value for option, value in epoch.items() if value is not None}
    with _refusing(ValueError):
        check_positive(**given)
        if len(given) == 1:
            more = "--batch" if "--samples" in given else "--samples or --model"
            raise ValueError(f"predict: expected {more} with {next(iter(given))}")
        if chosen.trace and len(chosen.gpu or ()) != 1:
            raise ValueError("--trace: expected one --gpu, whose timeline it is")
    with _of_target(chosen.words, _BEFORE_A_PREDICTION) as (target, _):
        predicted = predict(target, chosen.gpu, taken=chosen.taken)
        timeline = predicted.timeline() if chosen.trace else None
    shown = [repr(predicted)]
    if chosen.samples:
        steps = math.ceil(chosen.samples / chosen.batch)
        times = [(gpu.name, predicted.tell_time(gpu, steps)) for gpu in predicted.gpus if gpu.bandwidth]
        shown += ["", f"an epoch of {chosen.samples:,} samples takes {steps:,} steps", *align(times)]
    _give(predicted, chosen, "\n".join(shown), timeline=timeline)
    return _judge_fit(predicted) if chosen.gpu else SUCCEEDED


def _check_asked(
    chosen: argparse.Namespace, command: str, not_with_a_model: Sequence[str], only_with_a_model: Sequence[str] = ()
) -> dict[str, object]:
    """What is asked of a model beside its name: keywords of `fine_tuning`. Refuses what does not go together."""
    if not chosen.model:
        if any(map(_is_given, (getattr(chosen, name) for name in (*_OF_A_MODEL, *only_with_a_model)))):
            names = ", ".join(f"--{name}" for name in (*_OF_A_MODEL, *only_with_a_model)).replace("four_bits", "4bit")
            raise _Exit(REFUSED, f"{command}: expected --model with {names}")
        if not chosen.words:
            raise _Exit(
                REFUSED, f"{command}: expected a command, as in -- python train.py, FILE.py:VARIANT, or --model NAME"
            )
        return {}
    if chosen.words:
        raise _Exit(REFUSED, "--model: expected no command beside it")
    if given := [name for name in not_with_a_model if getattr(chosen, name) is not None]:
        raise _Exit(REFUSED, f"--{given[0]}: expected a command or FILE.py:VARIANT, and no --model")
    if chosen.batch is None:
        raise _Exit(REFUSED, "--model: expected --batch, the texts of a step")
    if not find_spec("transformers"):
        raise _Exit(REFUSED, "--model needs more: pip install transformers")
    asked = {name: getattr(chosen, name) for name in _OF_A_MODEL}
    return {name: value for name, value in asked.items() if _is_given(value)} | {"batch": chosen.batch}


def _is_given(value: object) -> bool:
    """Whether an option stands in the command: 0 does, too."""
    return value is not None and value is not False


def _predict_model(chosen: argparse.Namespace, how: dict[str, object]) -> int:
    from effgpu.predicting import models

    with _refusing(TypeError, ValueError, RuntimeError, ConnectionError):
        found = models.predict_model(chosen.model, gpu=chosen.gpu, samples=chosen.samples, price=chosen.price, **how)
    _give(found, chosen)
    return _judge_fit(found.predicted) if chosen.gpu else SUCCEEDED


def _judge_fit(predicted: "Prediction") -> int:
    """The exit code for the GPUs that were named."""
    from effgpu.predicting.prediction import DOES_NOT_FIT, MAY_NOT_FIT

    verdicts = {predicted.verdict(gpu) for gpu in predicted.gpus}
    if DOES_NOT_FIT in verdicts:
        return EXCEEDED
    return UNCLEAR if MAY_NOT_FIT in verdicts else SUCCEEDED


def _give(
    result: object,
    chosen: argparse.Namespace,
    shown: object = None,
    save: Callable | None = None,
    timeline: "Timeline | None" = None,
) -> None:
    """Print a result, or what is `shown` of it, then store it with --json, and its timeline with --trace.

    With --json -, its JSON is all that is printed.
    """
    as_json = json.dumps(result.to_dict(), indent=2, ensure_ascii=False) if chosen.json else ""
    print(as_json if chosen.json == "-" else shown or result)
    chosen.printed = True
    if chosen.json and chosen.json != "-":
        with _refusing(OSError, ValueError):
            save([result], chosen.json) if save else Path(chosen.json).write_text(f"{as_json}\n", encoding="utf-8")
    if timeline:
        with _refusing(OSError):
            timeline.save(chosen.trace)


@contextlib.contextmanager
def _of_target(words: list[str], before: str) -> Iterator[tuple[object, dict[str, object]]]:
    """The variant or the command, and the names of the variant's file. Inside, errors of either become exit codes.

    `before` is said before a script starts.
    """
    from effgpu.attaching.scripts import ScriptEnded, ScriptFailed

    only = words[0] if len(words) == 1 else " "  # a command in quotes has a space
    is_command = " " in only or Path(only).is_file() or shutil.which(only)  # such as one that a package installed
    if not is_command or re.fullmatch(r"\S+\.py:\w*", words[0]):
        with _failing(words[0]):
            found = _load(words[0], words[1:])
            with _refusing(Refusal):
                yield found
        return
    print(before.format(only.strip() or shlex.join(words)), file=sys.stderr)
    with _refusing(TypeError, ValueError, RuntimeError):
        try:
            yield only.strip() or words, {}
        except ScriptEnded as ended:
            if ended.output:
                print(ended.output, file=sys.stderr)
            if isinstance(ended, ScriptFailed):
                raise _Exit(FAILED, str(ended)) from ended
            raise


def _doctor(chosen: argparse.Namespace) -> int:
    how = _check_asked(chosen, "doctor", not_with_a_model=("loader", "trace"))
    if not chosen.model and chosen.batch is not None:
        raise _Exit(REFUSED, "doctor: expected --model with --batch")
    found = _diagnose_model(chosen, how) if chosen.model else _diagnose(chosen)
    _give(found, chosen, timeline=found.timeline if chosen.trace else None)
    return SUCCEEDED


def _diagnose(chosen: argparse.Namespace) -> "Diagnosis":
    from effgpu.diagnosing.doctor import doctor
    from effgpu.measuring.device import find_device

    here = not chosen.gpu and find_device().type == "cuda"
    with _of_target(chosen.words, _BEFORE_A_TRAINING if here else _BEFORE_A_DIAGNOSIS) as (target, names):
        if chosen.loader and chosen.loader not in names:
            raise _Exit(REFUSED, f"{shlex.join(chosen.words)}: expected a loader called {chosen.loader}")
        found = doctor(target, names[chosen.loader] if chosen.loader else None, chosen.gpu)
        if chosen.trace and not found.timeline:
            raise BadArgument(f"--trace: {found.notes[-1]}")
    return found


def _diagnose_model(chosen: argparse.Namespace, how: dict[str, object]) -> "Diagnosis":
    from effgpu.diagnosing.model import diagnose_model

    with _refusing(TypeError, ValueError, RuntimeError, ConnectionError):
        return diagnose_model(chosen.model, chosen.gpu, **how)


@contextlib.contextmanager
def _failing(name: str) -> Iterator[None]:
    """An error of the file that `name` is in, as one line that says where it is."""
    from effgpu.attaching.child import describe_error, find_line

    try:
        yield
    except _Exit:
        raise
    except (Exception, SystemExit) as error:
        line = find_line(error)
        raise _Exit(FAILED, f"{name} failed: {describe_error(error)}{f' ({line})' if line else ''}") from error


def _load(asked: str, arguments: Sequence[str] = ()) -> tuple[Callable, dict[str, object]]:
    """The function of FILE.py:VARIANT, or package.module:VARIANT, and all names of the file, which sees `arguments`.

    The file is run as a module, of its package where it is in one: so a DataLoader's workers find its classes. It stays
    one, and its folder a place of modules: a step may import what lies beside it, and pickle looks for its classes.
    """
    from effgpu.measuring.variants import is_function

    path, _, name = asked.rpartition(":")
    if not path:
        raise _Exit(REFUSED, f"expected a command, as in -- python train.py, or FILE.py:VARIANT; got {asked}")
    if not name:
        raise _Exit(REFUSED, f"{asked}: expected the name of a function after the colon, as in {asked}variant")
    path = Path(path)
    if not path.is_file() and (found := Path(*str(path).split(".")).with_suffix(".py")).is_file():
        path = found
    if not path.is_file() or path.suffix != ".py":
        raise _Exit(REFUSED, f"{path}: expected a Python file")
    folder, full_name = path.resolve().parent, path.stem
    while (folder / "__init__.py").is_file():
        folder, full_name = folder.parent, f"{folder.name}.{full_name}"
    sys.path.insert(0, str(folder))
    if package := full_name.rpartition(".")[0]:
        import_module(package)
    spec = spec_from_file_location(full_name, path)
    module = module_from_spec(spec)
    sys.modules[full_name] = module
    before, sys.argv = sys.argv, [str(path), *arguments]
    try:
        spec.loader.exec_module(module)
    finally:
        sys.argv = before
    names = vars(module)
    if not is_function(names.get(name)):
        raise _Exit(REFUSED, f"{path}: expected a function called {name}")
    return names[name], names


def _calibrate(chosen: argparse.Namespace) -> int:
    from effgpu.predicting import calibration, gpus

    with _refusing(RuntimeError, OSError, ValueError):
        gpu = calibration.calibrate()
        path = calibration.store(gpu)
    print("\n".join(gpus.tell(gpu)))
    print(f"kept in {path}: predictions for {gpu.name} use it from now on")
    return SUCCEEDED


def _bench(chosen: argparse.Namespace) -> int:
    if chosen.plot:
        if not find_spec("matplotlib"):
            raise _Exit(REFUSED, "--plot needs more: pip install matplotlib")
        from effgpu.figures.panels import can_save
        from effgpu.figures.plot import plot

        if not can_save(chosen.plot):
            raise _Exit(REFUSED, f"--plot: expected a name that ends in .png, .svg or .pdf, got {chosen.plot}")
    if not (chosen.commands or chosen.name):
        raise _Exit(
            REFUSED, "bench: expected commands, such as effgpu bench 'python train.py' 'python train.py --bf16'"
        )
    from effgpu import results
    from effgpu.benching.bench import bench

    options = ("seconds", "precision", "skip", "timeout", "unit", "one_at_a_time", "control", "logs")
    options += ("seeds", "until", "until_loss")
    try:
        with _refusing(OSError, TypeError, ValueError):
            result = bench(
                _read_commands(chosen), refs=chosen.ref, **{option: getattr(chosen, option) for option in options}
            )
    except KeyboardInterrupt:
        print("effgpu: interrupted before anything was measured", file=sys.stderr)
        raise
    print(f"output: {', '.join(result.logs.values())}", file=sys.stderr)
    _give(result, chosen, result.markdown() if chosen.markdown else result, results.save)
    if chosen.plot:
        with _refusing(OSError, ValueError):
            plot(result).savefig(chosen.plot)
            if chosen.seeds and (curves := result.curves).by_label:
                plot(curves).savefig(chosen.plot.with_stem(f"{chosen.plot.stem}-losses"))
    if result.interrupted:
        return INTERRUPTED
    trained = [run for runs in result.runs.values() for run in runs] if chosen.seeds else []
    if any(each.failed for each in [*result, *trained]):
        return FAILED
    if chosen.seeds and result.seeds_change_nothing:
        return UNCLEAR
    exceeded, unclear = result.judge(chosen.fail_if_slower, chosen.fail_if_more_memory)
    for verdict in [*exceeded, *unclear]:
        print(f"effgpu: {verdict}", file=sys.stderr)
    return EXCEEDED if exceeded else UNCLEAR if unclear else SUCCEEDED


def _read_commands(chosen: argparse.Namespace) -> list[str] | dict[str, str]:
    """The commands, by label where one has one, those last. Raises ValueError for no label, or the same twice."""
    from effgpu.attaching.commands import STARTERS

    commands = chosen.commands
    if len(commands) > 1 and (chosen.ref or re.fullmatch(STARTERS, Path(commands[0]).name)):  # one command's words
        commands = [shlex.join(commands)]
    if not chosen.name:
        return commands
    named = [text.partition("=") for text in chosen.name]
    given = [*zip(commands, commands), *((label.strip(), command.strip()) for label, _, command in named)]
    if not all(label and command for label, command in given) or len(dict(given)) < len(given):
        raise ValueError(f"--name: expected LABEL=COMMAND, each label once, got {chosen.name}")
    return dict(given)


if __name__ == "__main__":
    sys.exit(main())
