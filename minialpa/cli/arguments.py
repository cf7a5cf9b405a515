"""Arguments that several commands share: texts of the command line in, checked values out. Needs no jax."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from minialpa.errors import MinialpaError, ShardingError, meant

if TYPE_CHECKING:
    from minialpa.cluster import ClusterSpec, PresetName
    from minialpa.methods import Method

# Copies of names in modules that import jax. A test compares them.
METHODS = ("AutoParallel", "ShardParallel", "DataParallel", "Zero2Parallel", "Zero3Parallel", "PipeshardParallel")
PRESETS = ("v100-p3.16xlarge", "a100-40gb", "a100-80gb", "h100", "h200", "b200", "cpu")
EFFORTS = ("fast", "balanced", "proof")
PHASES = ("trace", "layers", "rematerialise", "microbatch", "stages", "shardings", "instructions")

_DEFAULT_PRESET = "a100-80gb"
#: The contract of `MODULE:FUNCTION`.
CONTRACT = (
    "The function returns `(step, state, batch)`: the training step for one device and its arguments, arrays or "
    "`jax.ShapeDtypeStruct`s; or `(step, (state, batch))`. `--batch N` calls the function with `batch_size=N`."
)
_UNITS = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


class Parser(argparse.ArgumentParser):
    """Reports an error as one paragraph."""

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith((".", "?")) else "."
        self.exit(2, f"{self.prog}: {message}{end} `{self.prog} --help` describes the arguments.\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        option = next((one.partition("=")[0] for one in unknown if one.startswith("-")), None)
        if option is None:
            self.error(f"`{unknown[0]}` is one argument too many")
        self.error(f"There is no option `{option}`.{meant(option, re.findall(r'--[a-z-]+', self.format_help()))}")


# ---- types -----------------------------------------------------------------------------------------------------------


def positive(text: str) -> int:
    number = count(text)
    if number == 0:
        raise argparse.ArgumentTypeError("0 is not positive; pass 1 or more")
    return number


def count(text: str) -> int:
    if not text.isdecimal():
        what = "is not positive" if re.fullmatch(r"-\d+", text) else "is not a whole number"
        raise argparse.ArgumentTypeError(f"{text} {what}")
    return int(text)


def n_bytes(text: str) -> float:
    """`40GB` -> 4e10. Units are B, kB, MB, GB, TB, KiB, MiB, GiB and TiB, in any case."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)", text.strip())
    if found is None or found[2].lower() not in _UNITS or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(
            f"`{text}` is no size; pass a positive number with a unit, such as 40GB or 38GiB"
        )
    return float(found[1]) * _UNITS[found[2].lower()]


def output_file(text: str) -> Path:
    """An error comes here, before minutes of work."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"`{path}` is a folder; name a file in it, such as `{path / 'plan.json'}`")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"There is no folder `{path.parent}` to write `{path.name}` to; make it with `mkdir -p {path.parent}`"
        )
    return path


def one_of(what: str, names: Sequence[str], ending: str = "") -> dict[str, Any]:
    """Keywords of `add_argument`. Any case fits, without `ending`."""

    def found(text: str) -> str:
        for name in names:
            if text.lower() in (name.lower(), name.lower().removesuffix(ending.lower())):
                return name
        listed = meant(text, names) or f" Choose one of {', '.join(names)}."
        raise argparse.ArgumentTypeError(f"There is no {what} `{text}`.{listed}")

    return {"type": found, "choices": names}


# ---- groups of arguments ---------------------------------------------------------------------------------------------


def add_completed(parser: Any, *flags: str, names: Callable[[], Iterable[str]], ending: str, **keywords: Any) -> None:
    """One of `names`, or a file with this ending, which shells complete, or another text."""

    def complete(prefix: str, **_: Any) -> list[str]:
        from argcomplete.completers import FilesCompleter

        return [one for one in names() if one.startswith(prefix)] + list(FilesCompleter([ending])(prefix))

    parser.add_argument(*flags, **keywords).completer = complete


def add_json(parser: Any) -> None:
    parser.add_argument(
        "--json",
        nargs="?",
        type=output_file,
        const=True,
        metavar="FILE",
        help="write the result as JSON to FILE; without FILE, print JSON only",
    )


def add_html(parser: Any) -> None:
    parser.add_argument("--html", type=output_file, metavar="FILE", help="write the result as a page for a browser")


def add_plan_file(parser: Any) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN.json", help="a plan of `minialpa plan MODEL --save PLAN.json`")


def add_model(parser: Any) -> None:
    add_completed(
        parser,
        "model",
        names=model_names,
        ending="py",
        metavar="MODEL",
        help="a model such as `gpt-1.3b` (`minialpa --models` lists them), or `FILE.py:FUNCTION` or `MODULE:FUNCTION`. "
        f"{CONTRACT}",
    )
    parser.add_argument(
        "--args",
        metavar="NAMES",
        help="FUNCTION is the training step itself, and these names are its arguments, such as `state,batch`, or a "
        "function that returns them",
    )
    parser.add_argument(
        "--batch", "--batch-size", type=positive, metavar="N", help="examples in a batch; default: the model's"
    )


def model_names() -> Iterable[str]:
    from minialpa import models

    return {**models.MODELS, **models.SIZES}


def add_devices(parser: Any) -> None:
    add_completed(
        parser,
        "--cluster",
        names=lambda: PRESETS,
        ending="json",
        help=f"a preset ({', '.join(PRESETS)}), with hosts and devices per host as in `h100:2x8`, or a JSON file of "
        "`minialpa calibrate`",
    )
    parser.add_argument("--num-hosts", type=positive, metavar="N", help="hosts of a preset; default 1")
    parser.add_argument("--devices-per-host", type=positive, metavar="N", help="devices of a host; default 8")


def add_method(parser: Any) -> None:
    parser.add_argument(
        "--method",
        **one_of("method", METHODS, "Parallel"),
        metavar="NAME",
        help=f"{', '.join(METHODS)}; default: the first",
    )
    parser.add_argument(
        "--effort", **one_of("effort", EFFORTS), metavar="NAME", help="fast, balanced (default) or proof: planning time"
    )


def add_planning(parser: Any) -> None:
    add_method(parser)
    parser.add_argument(
        "--memory", type=n_bytes, metavar="SIZE", help="memory limit of a device, such as 40GB; default: its memory"
    )
    parser.add_argument(
        "--micro-batches", type=count, metavar="N", help="a divisor of the batch; default: of the method"
    )
    parser.add_argument("--layers", type=count, metavar="N", help="layers of a pipeline; default: of the method")


#: The options of `add_devices` and `add_planning`.
PLANNING = ("cluster", "num_hosts", "devices_per_host", "method", "memory", "micro_batches", "layers", "effort")


# ---- values of groups ------------------------------------------------------------------------------------------------


def cluster_of(args: argparse.Namespace) -> ClusterSpec:
    """Raises MinialpaError."""
    from minialpa.cluster import ClusterSpec

    text: str = args.cluster or _DEFAULT_PRESET
    name, _, size = text.partition(":")
    is_file = text.endswith(".json") or (name.lower() not in PRESETS and Path(text).is_file())
    if (is_file or size) and (args.num_hosts or args.devices_per_host):
        raise MinialpaError(f"`{text}` has its own hosts. Leave out --num-hosts and --devices-per-host.")
    if is_file:
        return _cluster_in_file(Path(text))

    preset = preset_named(name)
    hosts, per_host = args.num_hosts or 1, args.devices_per_host or 8
    if ":" in text:
        found = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)", size.lower())
        if found is None:
            raise MinialpaError(
                f"`{text}` has no size after the colon. Write hosts x devices per host, such as `{preset}:2x8`, or the "
                f"devices of one host, such as `{preset}:8`."
            )
        hosts, per_host = int(found[1] or 1), int(found[2])
    return ClusterSpec.preset(preset, num_hosts=hosts, devices_per_host=per_host)


def preset_named(name: str) -> PresetName:
    """In any case. Raises MinialpaError with near names."""
    found: Any = next((one for one in PRESETS if one == name.lower()), None)
    if found is None:
        listed = meant(name, PRESETS) or f" Choose one of {', '.join(PRESETS)}, or name a JSON file."
        raise MinialpaError(f"There is no cluster preset `{name}`.{listed}")
    return cast("PresetName", found)


def _cluster_in_file(path: Path) -> ClusterSpec:
    from minialpa.cluster import ClusterSpec

    if not path.is_file():
        raise MinialpaError(f"There is no file `{path}`. `minialpa calibrate --out {path}` writes it.")
    try:
        return ClusterSpec.from_json(path.read_text(encoding="utf-8", errors="replace"))
    except ShardingError as error:
        raise ShardingError(f"`{path}`: {error}") from error


def method_of(args: argparse.Namespace, devices: ClusterSpec | None) -> Method:
    """devices: None for the devices of this process."""
    import minialpa

    name = args.method or METHODS[0]
    options: dict[str, Any] = {"devices": devices}
    if args.micro_batches:
        options["num_micro_batches"] = args.micro_batches
    if args.layers:
        if name not in ("AutoParallel", "PipeshardParallel"):
            raise MinialpaError(f"--layers is for pipelines, and {name} makes no pipeline. Leave it out.")
        options["layer_option"] = minialpa.AutoLayerOption(
            args.layers, remat="auto" if name == "AutoParallel" else "none"
        )
    if args.memory is not None:
        prefix = "default_" if name == "PipeshardParallel" else ""
        options[f"{prefix}auto_sharding_option"] = minialpa.AutoShardingOption(memory_limit_bytes=args.memory)
    made: Method = getattr(minialpa, name)(**options)
    return made
