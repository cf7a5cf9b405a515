"""The name or file of a GPU in, a `GpuTarget` out, with the text that XLA's compiler reads.

The figures are from openxla/xla (xla/backends/gpu/target_config/specs/*.txtpb, commits 4336d12 and 300ec95).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minialpa.errors import VerifyError, meant


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTarget:
    """One kind of GPU.

    Attributes:
        name: of the driver.
        compute_capability: (major, minor) of CUDA.
        n_cores: streaming multiprocessors.
        n_fpus_per_core: units for 32-bit floating point in a streaming multiprocessor.
        clock_ghz: highest clock rate of the cores.
        shared_bytes_per_block: most shared memory that a block can request.
        cudnn: (major, minor) of cuDNN on the target. Compiling does not need it.
    """

    name: str
    compute_capability: tuple[int, int]
    n_cores: int
    n_fpus_per_core: int
    clock_ghz: float
    memory_bytes: int
    memory_bandwidth: int
    l2_bytes: int
    shared_bytes_per_core: int
    shared_bytes_per_block: int
    cudnn: tuple[int, int] = (9, 10)

    @property
    def flags(self) -> tuple[str, ...]:
        """For the target, besides the options with which a plan compiles its functions.

        Tuning is off, since it needs a GPU. The program gets XLA's estimate for each kernel. From Hopper on, the
        scheduler has tables of measured kernels; without tables, it guesses the overlap.
        """
        has_tables = self.compute_capability >= (9, 0)
        return (
            "--xla_gpu_autotune_level=0",
            f"--xla_gpu_enable_analytical_sol_latency_estimator={str(has_tables).lower()}",
            "--xla_gpu_collect_cost_model_stats=true",
        )

    @property
    def text(self) -> str:
        """`GpuTargetConfigProto`, with CUDA's limits of blocks."""
        major, minor = self.compute_capability
        # From Hopper on, XLA compiles for the features of exactly this generation.
        features = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        return (
            "gpu_device_info { "
            "threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 "
            "block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 "
            "registers_per_core_limit: 65536 registers_per_block_limit: 65536 shared_memory_per_block: 49152 "
            f"shared_memory_per_core: {self.shared_bytes_per_core} "
            f"shared_memory_per_block_optin: {self.shared_bytes_per_block} "
            f"core_count: {self.n_cores} fpus_per_core: {self.n_fpus_per_core} clock_rate_ghz: {self.clock_ghz} "
            f"memory_bandwidth: {self.memory_bandwidth} l2_cache_size: {self.l2_bytes} "
            f"device_memory_size: {self.memory_bytes} "
            f"cuda_compute_capability {{ major: {major} minor: {minor}{features} }} }} "
            f'platform_name: "CUDA" device_description_str: "{self.name}" '
            f"dnn_version_info {{ major: {self.cudnn[0]} minor: {self.cudnn[1]} }} "
            "runtime_version { major: 13 minor: 0 patch: 0 }"
        )


_A100 = GpuTarget(
    name="NVIDIA A100-SXM4-40GB",
    compute_capability=(8, 0),
    n_cores=108,
    n_fpus_per_core=64,
    clock_ghz=1.41,
    memory_bytes=42_331_013_120,
    memory_bandwidth=1_555_200_000_000,
    l2_bytes=41_943_040,
    shared_bytes_per_core=167_936,
    shared_bytes_per_block=166_912,
)
_H100 = GpuTarget(
    name="NVIDIA H100 80GB HBM3",
    compute_capability=(9, 0),
    n_cores=132,
    n_fpus_per_core=128,
    clock_ghz=1.98,
    memory_bytes=84_942_979_072,
    memory_bandwidth=3_352_320_000_000,
    l2_bytes=52_428_800,
    shared_bytes_per_core=233_472,
    shared_bytes_per_block=232_448,
)
#: By the names of devices in `cluster`.
TARGETS: dict[str, GpuTarget] = {
    "v100": GpuTarget(
        name="Tesla V100-SXM2-16GB",
        compute_capability=(7, 0),
        n_cores=80,
        n_fpus_per_core=64,
        clock_ghz=1.53,
        memory_bytes=16_935_682_048,
        memory_bandwidth=898_048_000_000,
        l2_bytes=6_291_456,
        shared_bytes_per_core=98_304,
        shared_bytes_per_block=98_304,
    ),
    "a100-40gb": _A100,
    "a100-80gb": dataclasses.replace(
        _A100,
        name="NVIDIA A100-SXM4-80GB",
        memory_bytes=85_100_068_864,
        memory_bandwidth=2_039_040_000_000,
    ),
    "h100": _H100,
    "h200": dataclasses.replace(
        _H100,
        name="NVIDIA H200 141GB HBM3e",
        memory_bytes=151_397_597_184,
        memory_bandwidth=4_800_000_000_000,
    ),
    "b200": dataclasses.replace(
        _H100,
        name="NVIDIA B200",
        compute_capability=(10, 0),
        n_cores=148,
        clock_ghz=1.965,
        memory_bytes=191_514_411_008,
        memory_bandwidth=7_672_320_000_000,
        l2_bytes=132_644_864,
    ),
}


def target_of(name: str) -> GpuTarget:
    """By a key of `TARGETS`, or in the JSON file of this name.

    Raises VerifyError if there is neither, or if the file has other fields than `GpuTarget`.
    """
    if name in TARGETS:
        return TARGETS[name]
    try:
        values: dict[str, Any] = json.loads(Path(name).read_text(encoding="utf-8"))
        pairs = ("compute_capability", "cudnn")
        fields: dict[str, Any] = {key: tuple(x) if key in pairs else x for key, x in values.items()}
        return GpuTarget(**fields)
    except OSError as error:
        raise VerifyError(
            f"There is no GPU `{name}`, and no file of that name.{meant(name, TARGETS)} Pass one of "
            f"{', '.join(TARGETS)} as `target` (as `--target` to `minialpa check`), or a JSON file with the fields of "
            "`GpuTarget`."
        ) from error
    except (AttributeError, TypeError, ValueError) as error:
        names = ", ".join(field.name for field in dataclasses.fields(GpuTarget))
        raise VerifyError(f"`{name}` describes no GPU ({error}). Write the fields {names} into it, as JSON.") from error
