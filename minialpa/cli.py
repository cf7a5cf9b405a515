"""Plan training steps for many devices, read the plans, and check what works on this machine."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.metadata as metadata
import inspect
import io
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from minialpa.errors import MinialpaError, ShardingError, VerifyError
from minialpa.inter.phases import PHASES
from minialpa.options import PlanningEffort
from minialpa.plan import Plan
from minialpa.support.files import write_text

if TYPE_CHECKING:
    from minialpa.cluster import ClusterSpec
    from minialpa.methods import Method
    from minialpa.plan.check import PlanCheck

#: The contract of `module:function`.
_CONTRACT = (
    "The function returns `(step, state, batch)`: the training step for one device and its arguments, arrays or "
    "`jax.ShapeDtypeStruct`s; or `(step, (state, batch))`. `--batch-size N` calls the function with `batch_size=N`."
)


#: The methods that `minialpa plan` takes by name, the default first.
_METHODS = ("AutoParallel", "ShardParallel", "DataParallel", "Zero2Parallel", "Zero3Parallel", "PipeshardParallel")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Errors of minialpa and of files are printed without a traceback."""
    args = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # the terminal's locale may lack letters of a name
        sys.stdout.reconfigure(errors="backslashreplace")

    try:
        status: int = args.run(args)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, so that a full disk or a closed pipe is an error of this command
        return status
    except KeyboardInterrupt:
        return 130  # the status of shells after an interrupt
    except BrokenPipeError:  # the reader, such as `head`, has ended
        _drop_output()
        return 1
    except OSError as error:
        _drop_output()
        return _print_error(str(error))

    except ModuleNotFoundError as error:
        if error.name not in ("flax", "optax"):
            raise
        return _print_error("The models need flax and optax. Install them with `pip install 'minialpa[models]'`.")
    except MinialpaError as error:
        return _print_error(str(error))


def _print_error(message: str) -> int:
    """Print the message; returns the exit status 1."""
    print(f"minialpa: {message}", file=sys.stderr)
    return 1


def _drop_output() -> None:
    """Let Python discard, when it ends, the output that it could not write."""
    with suppress(AttributeError, OSError, ValueError):  # there is no output, or it is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _positive(text: str) -> int:
    number = _number(text)
    if number == 0:
        raise argparse.ArgumentTypeError("0 is not positive; pass 1 or more")
    return number


def _number(text: str) -> int:
    if not text.isdecimal():
        what = "is not positive" if text[:1] == "-" else "is not a whole number"
        raise argparse.ArgumentTypeError(f"{text} {what}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    import minialpa

    parser = argparse.ArgumentParser(prog="minialpa", description=__doc__)
    names = [phase.name for phase in PHASES]
    parser.add_argument("--version", action="version", version=f"minialpa {minialpa.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="train a small GPT on virtual CPU devices, and on one device to compare")
    demo.add_argument("--devices", type=_positive, default=8, help="virtual CPU devices (default 8)")
    demo.add_argument("--steps", type=_positive, default=8, help="training steps (default 8)")
    demo.set_defaults(run=_demo)

    plan = commands.add_parser("plan", help="plan a model for a cluster; needs no device")
    plan.add_argument("model", help=f"a model such as `gpt` or `gpt-1.3b`, or `module:function`. {_CONTRACT}")
    plan.add_argument("--cluster", default="a100-80gb", help="a preset, or a JSON file of a ClusterSpec")
    plan.add_argument("--num-hosts", type=_positive, default=None, help="hosts of a preset; default 1")
    plan.add_argument("--devices-per-host", type=_positive, default=None, help="devices of a host; default 8")
    plan.add_argument("--method", choices=_METHODS, default=_METHODS[0], help=f"default {_METHODS[0]}, a search")
    plan.add_argument("--batch-size", type=_positive, default=None, help="examples in a batch; default: the model's")
    plan.add_argument(
        "--micro-batches", type=_number, default=0, help="a divisor of the batch; 0 (default) leaves it to the method"
    )
    plan.add_argument(
        "--layers", type=_number, default=0, help="layers of a pipeline; 0 (default) leaves them to the method"
    )
    plan.add_argument(
        "--effort",
        choices=get_args(PlanningEffort),
        default=None,
        help="how long planning may take; default balanced",
    )
    plan.add_argument("--save", type=Path, default=None, metavar="PLAN.json", help="write the plan to this file")
    plan.add_argument(
        "--dump",
        nargs="?",
        const="all",
        default=None,
        choices=("all", *names),
        metavar="PHASE",
        help=f"print the step after a phase ({', '.join(names)}); without PHASE, write all to the folder `phases`",
    )
    plan.add_argument(
        "--diff", nargs=2, choices=names, default=None, metavar="PHASE", help="print what changes between two phases"
    )
    plan.add_argument("--check", action="store_true", help="compile the plan for the GPU, as `minialpa check` does")
    plan.set_defaults(run=_plan)

    check = commands.add_parser("check", help="compile a saved plan for its GPU, and compare; needs no GPU")
    check.add_argument("plan", type=Path, metavar="PLAN.json")
    check.add_argument("model", help="the model of the plan, as in `minialpa plan`")
    check.add_argument("--target", default=None, help="a GPU such as `h100`, or a JSON file; default: the plan's")
    check.add_argument("--batch-size", type=_positive, default=None, help="examples in a batch; default: the plan's")
    check.add_argument("--cache", type=Path, default=None, metavar="FOLDER", help="keep compiled programs here")
    check.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the comparison to this file")
    check.set_defaults(run=_check)

    report = commands.add_parser("report", help="print a saved plan")
    report.add_argument("plan", type=Path, metavar="PLAN.json")
    shown = report.add_mutually_exclusive_group()
    shown.add_argument(
        "--explain", default=None, metavar="WHAT", help="only placements and operators whose name has WHAT in it"
    )
    shown.add_argument("--python", action="store_true", help="placements as Python source, for `jax.jit`")
    report.set_defaults(run=_report)

    diff = commands.add_parser("diff", help="print how the decisions of two saved plans differ; status 1 if so")
    diff.add_argument("plans", type=Path, nargs=2, metavar="PLAN.json")
    diff.set_defaults(run=_diff)

    calibrate = commands.add_parser(
        "calibrate", help="measure the devices of this machine, for `--cluster`; takes minutes"
    )
    calibrate.add_argument("--out", type=Path, default=None, metavar="FILE", help="write the measured ClusterSpec here")
    calibrate.add_argument(
        "--virtual-devices", type=_positive, default=None, metavar="N", help="measure N virtual CPU devices"
    )
    calibrate.set_defaults(run=_calibrate)

    doctor = commands.add_parser("doctor", help="print what is installed, and which devices and transports work")
    doctor.set_defaults(run=_doctor)
    return parser


def _demo(args: argparse.Namespace) -> int:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    from minialpa.demo import run_demo

    return run_demo(args.devices, args.steps)


def _plan(args: argparse.Namespace) -> int:
    import minialpa
    from minialpa.cluster import ClusterSpec

    if args.cluster.endswith(".json") and not Path(args.cluster).is_file():
        raise MinialpaError(f"There is no file `{args.cluster}`. `minialpa calibrate --out {args.cluster}` writes it.")
    if Path(args.cluster).is_file():
        if args.num_hosts or args.devices_per_host:
            raise MinialpaError(f"`{args.cluster}` has its own hosts. Leave out --num-hosts and --devices-per-host.")
        text = Path(args.cluster).read_text(encoding="utf-8", errors="replace")
        try:
            cluster = ClusterSpec.from_json(text)
        except ShardingError as error:
            raise ShardingError(f"`{args.cluster}`: {error}") from error
    else:
        n_hosts, devices_per_host = args.num_hosts or 1, args.devices_per_host or 8
        cluster = ClusterSpec.preset(args.cluster, num_hosts=n_hosts, devices_per_host=devices_per_host)
    if args.save is not None:
        _check_folder(args.save)

    model = _load_step(args.model, args.batch_size)
    method = _method(args, cluster)

    start = time.perf_counter()
    found = minialpa.parallelize(
        model.step, method=method, on_ragged="error", plan_cache=None, planning_effort=args.effort
    ).plan(*model.args)
    print(found.summary())
    print(f"Planned in {time.perf_counter() - start:.1f} s.")
    if args.save is not None:
        found.save(args.save)
        print(f"Written to {args.save}.")
    if args.dump is not None or args.diff is not None:
        _print_phases(minialpa.phases(found, model.step, model.args), args.dump, args.diff)
    if args.check:
        return _print_check(minialpa.check(found, model.step, model.args))
    return 0


def _method(args: argparse.Namespace, cluster: ClusterSpec) -> Method:
    import minialpa

    options: dict[str, Any] = {"devices": cluster}
    if args.micro_batches:
        options["num_micro_batches"] = args.micro_batches
    if args.layers:
        if args.method not in ("AutoParallel", "PipeshardParallel"):
            raise MinialpaError(f"--layers is for pipelines, and {args.method} makes no pipeline. Leave it out.")
        is_search = args.method == "AutoParallel"
        options["layer_option"] = minialpa.AutoLayerOption(args.layers, remat="auto" if is_search else "none")
    made: Method = getattr(minialpa, args.method)(**options)
    return made


def _print_phases(phases: Mapping[str, str], dump: str | None, diff: Sequence[str] | None) -> None:
    if dump == "all":
        folder = Path("phases")
        folder.mkdir(exist_ok=True)
        for i, (name, text) in enumerate(phases.items()):
            write_text(folder / f"{i}-{name}.txt", text)
        print(f"Written to {folder}: {', '.join(phases)}.")
    elif dump is not None:
        print(phases[dump])
    if diff is not None:
        old, new = (phases[name].splitlines() for name in diff)
        print("\n".join(difflib.unified_diff(old, new, diff[0], diff[1], lineterm="")))


def _check(args: argparse.Namespace) -> int:
    """The exit status is 1 if a stage needs more memory than its devices have."""
    import minialpa
    from minialpa.inter.staging.replan import StalePlanError

    plan = _load_plan(args.plan)
    if args.json is not None:
        _check_folder(args.json)
    model = _load_step(args.model, args.batch_size, plan.n_examples)
    try:
        found = minialpa.check(plan, model.step, model.args, target=args.target, cache=args.cache)
    except StalePlanError as error:
        raise MinialpaError(
            f"`{args.plan}` was made for another model or batch than `{args.model}`: {error.difference}. Plan that one "
            f"with `minialpa plan {args.model} --save {args.plan}`."
        ) from error
    if args.json is not None:
        write_text(args.json, found.to_json())
    return _print_check(found)


def _print_check(found: PlanCheck) -> int:
    print(found.summary())
    return 0 if found.fits else 1


def _calibrate(args: argparse.Namespace) -> int:
    import jax

    if args.virtual_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.virtual_devices)
    if args.out is not None:
        _check_folder(args.out)
    from minialpa.calibration import calibrate

    found = calibrate()
    print(found.summary())
    if args.out is not None:
        write_text(args.out, found.cluster.to_json())
        print(f"Written to {args.out}.")
    return 0


def _check_folder(path: Path) -> None:
    """Raise MinialpaError for a path that cannot be written, before minutes of work."""
    if not path.parent.is_dir():
        raise MinialpaError(
            f"There is no folder `{path.parent}` to write `{path.name}` to. Make it with `mkdir -p {path.parent}`."
        )
    if path.is_dir():
        raise MinialpaError(f"`{path}` is a folder. Name a file in it, such as `{path / 'plan.json'}`.")


def _report(args: argparse.Namespace) -> int:
    plan = _load_plan(args.plan)
    if args.python:
        for mesh in range(len(plan.stages)):
            print(plan.to_python(mesh))
    else:
        print(plan.summary() if args.explain is None else plan.explain(args.explain))
    return 0


def _diff(args: argparse.Namespace) -> int:
    """The exit status is 1 if the plans differ, as with `diff`."""
    old, new = map(_load_plan, args.plans)
    print(old.diff(new))
    return 0 if old == new else 1


def _load_plan(path: Path) -> Plan:
    try:
        return Plan.load(path)
    except OSError as error:
        raise VerifyError(
            f"`{path}` cannot be read: {error.strerror}. Write a plan with `minialpa plan MODEL --save {path}`."
        ) from error
    except VerifyError as error:
        raise VerifyError(f"`{path}`: {error}") from error


@dataclass(frozen=True, slots=True)
class _NamedStep:
    step: Callable[..., Any]
    args: tuple[Any, ...]


def _load_step(name: str, batch_size: int | None, planned_size: int | None = None) -> _NamedStep:
    """A model of `minialpa.models`, or the result of `module:function`.

    batch_size: from the command line. planned_size: from a saved plan.
    """
    import jax

    import minialpa

    jax.config.update("jax_platforms", "cpu")  # planning needs no device, and GPUs may be busy or absent
    if ":" in name:
        return _users_model(name, batch_size, planned_size)

    from minialpa import models

    file = Path(name.removesuffix(".py") + ".py")
    if file.is_file() and name not in {**models.MODELS, **models.SIZES}:
        raise MinialpaError(f"`{name}` is no model. Name a function of {file}: `{file.stem}:FUNCTION`. {_CONTRACT}")
    case = models.build(name)
    state = jax.eval_shape(case.init, jax.eval_shape(jax.random.key, 0))  # a real key would start a device
    batch = case.make_batch(0, batch_size or planned_size or case.batch_size)
    return _NamedStep(case.train_step(minialpa.value_and_grad), (state, batch))


def _users_model(name: str, batch_size: int | None, planned_size: int | None) -> _NamedStep:
    """The result of `module:function`. Raises MinialpaError, with the place, if it or the step fails."""
    import minialpa
    from minialpa.api.parallelized import ParallelizedFunc

    make = _find_function(name)
    options = _size_option(name, make, batch_size, planned_size)
    with _users_code(f"`{name}`"):
        returned = make(**options)
    if not isinstance(returned, tuple | list) or len(returned) < 2 or not callable(returned[0]):
        kind = type(returned).__name__
        if isinstance(returned, tuple | list):
            kind = f"({', '.join(type(value).__name__ for value in returned)})"
        raise MinialpaError(f"`{name}` returned {kind}, and it must return the step and its arguments. {_CONTRACT}")
    step, *args = returned
    if len(args) == 1 and type(args[0]) is tuple:  # as `minialpa.plan` takes them
        args = list(args[0])
    if isinstance(step, ParallelizedFunc):
        raise MinialpaError(f"`{name}` returned a parallelized step. Return the step itself, `step.__wrapped__`.")
    with _users_code(f"The step of `{name}`"):
        minialpa.parallelize(step).trace(*args)
    return _NamedStep(step, tuple(args))


def _size_option(
    name: str, make: Callable[..., Any], batch_size: int | None, planned_size: int | None
) -> dict[str, int]:
    """The batch size, if the user's function takes it. Raises MinialpaError if it needs anything else."""
    with _users_code(f"`{name}`"):
        parameters = inspect.signature(make).parameters.values()
    options = {}
    if any(p.name == "batch_size" or p.kind is p.VAR_KEYWORD for p in parameters):
        size = batch_size or planned_size
        options = {} if size is None else {"batch_size": size}
    elif batch_size is not None:
        raise MinialpaError(
            f"`{name}` has no parameter `batch_size`. Add this parameter to the function, or leave out `--batch-size`."
        )
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if not set(needed) <= {"batch_size"}:
        raise MinialpaError(
            f"`{name}` is called without arguments, except `batch_size`, and it needs {', '.join(needed)}. Give each a "
            "default value."
        )
    if needed and not options:
        raise MinialpaError(f"`{name}` needs a batch size. Give one with `--batch-size`.")
    return options


@contextmanager
def _users_code(what: str) -> Iterator[None]:
    """Raise errors of a user's code as MinialpaErrors that name the last line outside of libraries."""
    try:
        yield
    except MinialpaError:
        raise
    except Exception as error:
        libraries = (str(Path(__file__).parent), sys.base_prefix, "<")
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(libraries)]
        user_frames = [f for f in frames if "site-packages" not in f.filename]
        place = f" at {user_frames[-1].filename}:{user_frames[-1].lineno}" if user_frames else ""
        if isinstance(error, SyntaxError):
            place = f" at {error.filename}:{error.lineno}"
        raise MinialpaError(f"{what} failed{place} with {type(error).__name__}: {error}") from error


def _find_function(name: str) -> Callable[..., Any]:
    """The function that `module:function` names. The module is in the current folder or installed.

    Raises MinialpaError if there is no such function.
    """
    module, _, function = name.partition(":")
    if not module or not function:
        raise MinialpaError(f"`{name}` is no `module:function`. {_CONTRACT}")
    if module.endswith(".py") or os.sep in module:
        dotted = module.removesuffix(".py").replace(os.sep, ".").strip(".")
        raise MinialpaError(f"`{module}` is a file. Name the module: `{dotted}:{function}`.")

    sys.path.insert(0, os.getcwd())
    found: Any
    try:
        with _users_code(f"Importing `{module}`"):
            found = importlib.import_module(module)
    except MinialpaError as error:
        missing = getattr(error.__cause__, "name", None) if isinstance(error.__cause__, ModuleNotFoundError) else None
        if missing is None or not f"{module}.".startswith(f"{missing}."):
            raise  # the missing module is one that `module` imports
        raise MinialpaError(
            f"There is no module `{module}` in this folder or among the installed ones. Start minialpa in the folder "
            f"of `{module}`, or add that folder to PYTHONPATH."
        ) from error
    for part in function.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1)
            meant = f" Do you mean `{near[0]}`?" if near else ""
            raise MinialpaError(
                f"`{name}` cannot be called, because `{module}` has no `{function}`.{meant} Name a function of "
                f"`{module}` after the colon."
            )
        found = getattr(found, part)
    if not callable(found):
        raise MinialpaError(f"`{name}` is a {type(found).__name__}, not a function. {_CONTRACT}")
    return cast(Callable[..., Any], found)


#: Packages whose versions `doctor` prints, besides cupy, whose name depends on the version of CUDA.
_PACKAGES = ("minialpa", "jax", "jaxlib", "numpy", "pulp", "highspy", "flax", "optax", "ray")


def _doctor(args: argparse.Namespace) -> int:
    """The exit status is 1 if jax finds no device."""
    from minialpa.runtime.diagnosis import diagnose_transports
    from minialpa.support.machine_code import cache_folder

    for package in (*_PACKAGES, *metadata.packages_distributions().get("cupy", ["cupy"])):
        print(f"{package:14} {_version(package)}")
    kept = cache_folder() or "kept nowhere: no folder can be written, and every process compiles the planner's loops"
    print(f"{'machine code':14} {kept}")

    works = _print_devices()
    for transport, outcome in diagnose_transports().items():
        print(f"{transport:14} {outcome}")
    return 0 if works else 1


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _print_devices() -> bool:
    """Print jax's devices and their description for the planner. Returns whether there are any."""
    import jax

    from minialpa.session import describe_devices

    try:
        devices = jax.local_devices()
    except RuntimeError as error:  # the requested platform does not work
        print(f"{'devices':14} do not work: {error}")
        return False
    print(f"{'devices':14} {len(devices)} x {devices[0].device_kind} ({devices[0].platform})")
    print(json.dumps(json.loads(describe_devices(devices).to_json())["device"]))
    return True
