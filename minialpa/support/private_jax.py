"""The private names of jax that minialpa uses, from jax 0.10.2 on. A test keeps them out of all other modules.

The private name, its use, and in brackets the public function that could replace it:

    JaxprEqn.source_info, user_frames: source lines, name scopes (accessors in jax.extend.core)
    JaxprEqn.ctx, JaxprEqnContext: settings of an equation's trace (an accessor in jax.extend.core)
    abstract_mesh_context_manager, device_context: the user's mesh inside a trace (jax.set_mesh there)
    _discharge_refs, Ref._refs._buf: steps on the values of Refs (a discharge, and a setter of the array, in jax.ref)
    PjitFunction._jit_info: the options of a jitted function (an accessor in jax.stages)
    thread_resources: the mesh of `with mesh:` (jax.sharding.get_mesh there)
    config.trace_context: settings under which jax.jit reuses a traced function (an accessor in jax.config)
    Primitive.get_bind_params, abstract_eval: an equation on other operands (a function for both)
    ShapedArray.update: the aval of a part of an array (avals by jax.extend.core)
    ShapedArray.manual_axis_type: shard_map axes over which a new primitive varies (avals by jax.extend.core)
    jax.interpreters: rules of primitives that mark a trace (rules in jax.extend)
    mlir._lowerings, closure of lower_fun: computation and names of other primitives (a function in jax.extend)
    lib.mlir.ir: memory of arguments in programs for absent GPUs (devices of a topology with memories)
    mlir.module_to_string: whether exported functions are equal except for names (an argument of mlir_module)
    parameters of pallas_call: blocks of a kernel, its grid on a shard (accessors in jax.experimental.pallas)
    unsafe_buffer_pointer, on_device_size_in_bytes: NCCL, shared memory of arrays (a cheap __dlpack__)
    traceback_util: tracebacks without frames of jax and minialpa (a filter in jax.extend)
    DebugInfo: the user's names in messages about traced functions, new jaxprs (an argument of jax.jit, a default)
    ArrayImpl: recognising arrays of jax fast (a fast isinstance)
    PRNGKeyArray, pytype_aval_mappings, shard_arg_handlers: keys on workers that jax accepts (a protocol)
    make_cpu_client, make_gloo_tcp_collectives: the address that gloo binds (a setting of jax.config)
    fused_attention_stablehlo, cuda_versions: cuDNN's attention gradient from saved results (a function in jax.nn)

`jax.core.ShapedArray` and `jax.core.Tracer` are public.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

import jax
import numpy as np
from jax._src import config as private_config
from jax._src import mesh as private_mesh
from jax._src import traceback_util as private_traceback
from jax._src.api_util import debug_info, fun_sourceinfo, save_wrapped_fun_debug_info
from jax._src.array import ArrayImpl as ArrayImpl
from jax._src.config import trace_context
from jax._src.core import ArrayRefImpl, DebugInfo, JaxprEqnContext, extend_axis_env_nd, initial_result_paths
from jax._src.interpreters import batching as private_batching
from jax._src.interpreters import mlir as private_mlir
from jax._src.interpreters import pxla as private_pxla
from jax._src.lib.mlir import ir  # type: ignore[attr-defined]
from jax._src.source_info_util import user_frames
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.ref import Ref

Rule = Callable[..., Any]

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

# ---- tracebacks ------------------------------------------------------------------------------------------------------

private_traceback.register_exclusion(str(Path(__file__).parents[1]))
#: Methods that users call.
_CALLED = ("__call__", "__init__", "__next__")
#: Modes of `jax_traceback_filtering` that keep full tracebacks.
_FULL = ("off", "remove_frames")


def api_boundary(fun: F) -> F:
    """Decorates a public function: errors, and their causes, have only the user's frames.

    `jax_traceback_filtering="off"` keeps all frames.
    """

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fun(*args, **kwargs)
        except Exception as error:
            _filter_causes(error)
            raise

    return cast(F, private_traceback.api_boundary(call))


def api_boundaries(kind: C) -> C:
    """`api_boundary` for each own method of a class that users call."""
    for name, member in vars(kind).copy().items():
        method = getattr(member, "__func__", member)  # of a static method or a class method
        if inspect.isfunction(method) and (not name.startswith("_") or name in _CALLED):
            decorated = api_boundary(method)
            setattr(kind, name, decorated if member is method else type(member)(decorated))
    return kind


def warn(text: str) -> None:
    """A UserWarning with the user's line."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and not private_traceback.include_frame(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, UserWarning, stacklevel=level)


def _filter_causes(error: BaseException) -> None:
    """jax does not filter causes. Causes inside of minialpa are removed: the error explains them."""
    if private_config.traceback_filtering.value in _FULL:
        return
    seen = {id(error), id(None)}  # an error may be its own cause
    while id(cause := error.__cause__ or error.__context__) not in seen:
        assert cause is not None
        seen.add(id(cause))
        if cause.__traceback__ is not None:
            cause.__traceback__ = private_traceback.filter_traceback(cause.__traceback__)
        if cause.__traceback__ is None and type(cause).__module__.startswith("minialpa."):
            further = cause.__cause__ or cause.__context__
            error.__cause__ = None if id(further) in seen else further
            error.__context__ = None
        else:
            error = cause


def named_for_messages(traced: F, fun: Callable[..., Any], names: Sequence[str]) -> F:
    """Messages of jax name `fun`, its line, and `names` of argument leaves."""
    info = DebugInfo("jit", _name_and_line(fun), tuple(names), initial_result_paths)
    save_wrapped_fun_debug_info(traced, info)
    return traced


def _name_and_line(fun: Callable[..., Any]) -> str:
    with suppress(Exception):  # attributes of a callable object may raise anything
        if " at " in (found := fun_sourceinfo(fun)):
            return found
    return fun_sourceinfo(type(fun).__call__)


def argument_names(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[str]:
    return debug_info("jit", fun, args, dict(kwargs)).arg_names or ("",) * len(jax.tree.leaves((args, kwargs)))


# ---- source lines and name scopes of equations -----------------------------------------------------------------------


def name_stack(eqn: JaxprEqn) -> str:
    """Name scopes and transformations, outermost first."""
    return str(eqn.source_info.name_stack)


def in_scope(eqn: JaxprEqn, scope: str) -> JaxprEqn:
    source = eqn.source_info.replace(name_stack=source_info_util.new_name_stack(scope))
    new: JaxprEqn = eqn.replace(source_info=source)
    return new


def scopes_of(eqn: JaxprEqn) -> AbstractContextManager[Any]:
    """Adds the equation's name scopes to the present ones."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    context: AbstractContextManager[Any] = source_info_util.set_name_stack(stack)
    return context


def frames_of(eqn: JaxprEqn) -> Iterator[Any]:
    """Frames outside jax, innermost first; each has file_name, start_line, function_name."""
    return user_frames(eqn.source_info.traceback)


def innermost_line(eqn: JaxprEqn) -> str:
    """`file:line` of the innermost frame outside jax; a derivative has the line of its function."""
    return str(source_info_util.summarize(eqn.source_info))


def with_source_of(eqn: JaxprEqn, other: JaxprEqn) -> JaxprEqn:
    """With the source line, and inside the name scopes, of `other`."""
    scopes = other.source_info.name_stack + eqn.source_info.name_stack
    new: JaxprEqn = eqn.replace(source_info=other.source_info.replace(name_stack=scopes))
    return new


def with_some_line(eqn: JaxprEqn, caller: JaxprEqn) -> JaxprEqn:
    """With the source line of `caller` if `eqn` has no line of the user, as in functions that jax traces once and
    caches.
    """
    if _has_user_line(eqn.source_info.traceback):
        return eqn
    source = eqn.source_info.replace(traceback=caller.source_info.traceback)
    new: JaxprEqn = eqn.replace(source_info=source)
    return new


@functools.lru_cache(maxsize=4096)
def _has_user_line(traceback: Any) -> bool:
    return next(user_frames(traceback), None) is not None


def jaxpr_text(
    constants: Sequence[Any], inputs: Sequence[Any], eqns: Sequence[JaxprEqn], results: Sequence[Any]
) -> str:
    """A program as jax prints it, with source lines."""
    info = DebugInfo("step", "step", None, None)
    text: str = Jaxpr(constants, inputs, results, eqns, debug_info=info).pretty_print(source_info=True)
    return "\n".join(map(str.rstrip, text.splitlines()))


# ---- settings --------------------------------------------------------------------------------------------------------


def current_settings() -> Hashable:
    """The settings of this thread on which a traced function depends, in less than a microsecond.

    `jax.jit` retraces for all of them except the generator of `jax.random.key`.
    """
    config: Any = jax.config  # untyped flags
    return trace_context(), config.jax_default_prng_impl


class UsersMesh(NamedTuple):
    """The meshes that `jax.set_mesh` and `jax.sharding.use_abstract_mesh` set, or empty ones."""

    abstract: Any
    devices: Any


NO_MESH = UsersMesh(private_mesh.empty_abstract_mesh, private_mesh.empty_concrete_mesh)


def users_mesh() -> UsersMesh:
    return UsersMesh(private_mesh.get_abstract_mesh(), private_mesh.get_concrete_mesh())


@contextmanager
def under_mesh(mesh: UsersMesh) -> Iterator[None]:
    """Also inside a trace. jax raises an error if a program has arrays on another mesh."""
    if users_mesh() == mesh:  # jax would retrace after setting an equal mesh
        yield
        return
    # In jax.config before jax 0.12.
    states: Any = private_mesh if hasattr(private_mesh, "abstract_mesh_context_manager") else private_config
    abstract = states.abstract_mesh_context_manager.swap_local(mesh.abstract)
    devices = states.device_context.swap_local(mesh.devices)
    try:
        yield
    finally:
        states.abstract_mesh_context_manager.set_local(abstract)
        states.device_context.set_local(devices)


def mesh_of_context(mesh: UsersMesh) -> Any:
    """The mesh for bare PartitionSpecs in a call under `mesh`, if any."""
    known = (mesh.devices, mesh.abstract, private_mesh.thread_resources.env.physical_mesh)
    return next((one for one in known if not one.empty), None)


def options_of_jit(fun: Any) -> Any:
    """Of a `jax.jit` function, by jax's names, with shardings as leaves and a pytree; else None."""
    return getattr(fun, "_jit_info", None) if type(fun).__name__ == "PjitFunction" else None


def is_pmap(region: JaxprEqn) -> bool:
    """Whether `jax.pmap` made this `shard_map` equation."""
    return "jax/_src/pmap.py" in str(region.params["jaxpr"].debug_info.func_src_info).replace("\\", "/")


def mesh_of(eqn: JaxprEqn) -> Any:
    """The abstract mesh of the equation's trace; may be empty."""
    return eqn.ctx.cur_abstract_mesh


def with_no_mesh(eqn: JaxprEqn) -> JaxprEqn:
    """As if traced without a mesh, with the same variables."""
    with eqn.ctx.manager, under_mesh(NO_MESH):
        new: JaxprEqn = eqn.replace(ctx=JaxprEqnContext())
    return new


# ---- Refs ------------------------------------------------------------------------------------------------------------


def is_ref(aval: Any) -> bool:
    return type(aval).__name__ == "AbstractRef"


def without_refs(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any], list[int]]:
    """A program on the values of Refs, captured Refs, and numbers of the arguments of Refs.

    Values of captured Refs are the last arguments. New values of all these Refs, in order, are the last results.
    """
    program, _, refs = private_pxla._discharge_refs(closed)
    return program, list(refs.in_mut), [number for number in refs.out_mut if number is not None]


def value_of_ref(ref: Any) -> Any:
    """The array in a Ref, also one elsewhere; any other object unchanged."""
    if type(ref) is not Ref:
        return ref
    held = ref._refs
    return held.value() if type(held) is _Elsewhere else held._buf


def set_ref(ref: Any, array: Any) -> None:
    """The Ref fetches an array elsewhere when the user reads it."""
    ref._refs = (_Elsewhere if hasattr(array, "fetch_once") else ArrayRefImpl)(ref._aval, array)


class _Elsewhere(ArrayRefImpl):
    """A Ref's array elsewhere, until the user reads or changes it."""

    def __init__(self, aval: Any, array: Any) -> None:
        self._aval, self._array, self._here = aval, array, None

    @property
    def _buf(self) -> Any:  # type: ignore[override]
        # jax changes this committed array in place, so it shares no memory with the fetched value.
        if self._here is None:
            here = jax.numpy.array(self._array[...], copy=True)
            place = getattr(self._array, "user_sharding", None) or jax.local_devices()[0]
            self._here = jax.device_put(here, place)
        return self._here

    def value(self) -> Any:
        """Unless the user has changed the value here."""
        if self._here is None or self._is_unchanged():
            return self._array
        return self._here

    def _is_unchanged(self) -> bool:
        if jax.numpy.issubdtype(self._array.dtype, jax.dtypes.extended):
            return False
        return np.asarray(self._here).tobytes() == np.asarray(self._array).tobytes()


# ---- bound equations -------------------------------------------------------------------------------------------------


def settings_of(eqn: JaxprEqn) -> Hashable:
    context: Hashable = eqn.ctx
    return context


def unusual_settings(eqn: JaxprEqn) -> str:
    """Settings of the trace that change results and differ from jax's defaults, as stable text."""
    found = {
        "compute_type": eqn.ctx.compute_type,
        "threefry_partitionable": None if eqn.ctx.threefry_partitionable else False,
    }
    return " ".join(f"{name}={value}" for name, value in found.items() if value is not None)


def under_settings_of(eqn: JaxprEqn) -> AbstractContextManager[Any]:
    manager: AbstractContextManager[Any] = eqn.ctx.manager
    return manager


def compute_place(eqn: JaxprEqn) -> str | None:
    place: str | None = getattr(eqn.ctx, "compute_type", None)
    return place


def rebind(eqn: JaxprEqn, args: Sequence[Any], params: Mapping[str, Any]) -> Any:
    """Bind on other arguments, with the same source line."""
    bind_params = eqn.primitive.get_bind_params(dict(params))
    with source_info_util.user_context(eqn.source_info.traceback), eqn.ctx.manager:
        return eqn.primitive.bind(*args, **bind_params)


def at_line_of(eqn: JaxprEqn) -> AbstractContextManager[Any]:
    """New equations have the source line of `eqn`."""
    context: AbstractContextManager[Any] = source_info_util.user_context(eqn.source_info.traceback)
    return context


@contextmanager
def in_context_of(eqn: JaxprEqn) -> Iterator[None]:
    """New equations have the settings, the source line and, inside present scopes, the name scopes of `eqn`."""
    scopes = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=scopes), eqn.ctx.manager:
        yield


def with_constants_as_arguments(jaxpr: Jaxpr) -> Jaxpr:
    new: Jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    return new


def batched_program(
    program: ClosedJaxpr, axis: str, sizes: Mapping[str, int], is_mapped: Sequence[bool]
) -> tuple[ClosedJaxpr, list[bool]]:
    """The program under `jax.vmap(axis_name=axis)`, and whether each result is mapped: has the axis as dimension 0.

    sizes: of the axes over which the program has collectives.
    """
    data = private_batching.AxisData(axis, sizes[axis], None, None)
    in_dims = tuple(0 if mapped else None for mapped in is_mapped)
    others = [(name, size) for name, size in sizes.items() if name != axis]
    with extend_axis_env_nd(others):
        batched, dims = private_batching.batch_jaxpr2(program, data, in_dims)

    def in_front(*args: Any) -> list[Any]:
        results = jaxpr_as_fun(batched)(*args)
        return [x if dim is None else jax.numpy.moveaxis(x, dim, 0) for x, dim in zip(results, dims, strict=True)]

    return jax.make_jaxpr(in_front, axis_env=others)(*batched.in_avals), [dim is not None for dim in dims]


def result_avals(eqn: JaxprEqn, operands: Sequence[Any], params: Mapping[str, Any]) -> Sequence[Any]:
    out: Any
    with eqn.ctx.manager:
        out, _ = eqn.primitive.abstract_eval(*operands, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def changed_aval(aval: Any, **changes: Any) -> Any:
    return aval.update(**changes)


# ---- new primitives --------------------------------------------------------------------------------------------------


def define_jvp(primitive: Primitive, rule: Rule) -> None:
    """rule(primals, tangents, **params) -> (results, their tangents)."""
    ad.primitive_jvps[primitive] = rule


def define_linear(primitive: Primitive, transpose: Rule) -> None:
    """transpose(cotangent, *operands, **params) -> cotangents."""
    ad.deflinear2(primitive, transpose)


def define_bilinear(primitive: Primitive, transposes: tuple[Rule, Rule]) -> None:
    """For a primitive with one result that is linear in each of its first two operands.

    transposes: (cotangent, *operands, **params) -> cotangent of the first operand, and of the second.
    """

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        out = primitive.bind(*primals, **params)
        terms = [
            primitive.bind(*primals[:i], tangent, *primals[i + 1 :], **params)[0]
            for i, tangent in enumerate(tangents[:2])
            if type(tangent) is not ad.Zero
        ]
        tangent = functools.reduce(jax.numpy.add, terms) if terms else ad.Zero(out[0].aval.to_tangent_aval())
        return out, [tangent]

    def transpose(cotangents: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
        found = [None] * len(operands)
        for i, rule in enumerate(transposes):
            if ad.is_undefined_primal(operands[i]) and type(cotangents[0]) is not ad.Zero:
                found[i] = rule(cotangents[0], *operands, **params)
        return found

    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose


def define_batching(primitive: Primitive, rule: Rule) -> None:
    """rule(operands, their batch dimensions, **params) -> (results, their batch dimensions)."""
    batching.primitive_batchers[primitive] = rule


def define_axis_batching(primitive: Primitive, rule: Rule) -> None:
    """rule(axis name, axis size, operand, its dimension or None, **params) -> (result, its dimension or None)."""

    def batch(data: Any, operands: Sequence[Any], dims: Sequence[Any], /, **params: Any) -> Any:
        return rule(data.name, data.size, operands[0], dims[0], **params)

    batching.fancy_primitive_batchers[primitive] = batch


def define_lowering(primitive: Primitive, rule: Rule) -> None:
    """rule(context, *operands, **params) -> results, all MLIR values."""
    mlir.register_lowering(primitive, rule)


def define_function(primitive: Primitive, fun: Callable[..., Any], platform: str | None = None) -> None:
    """Lower a primitive with several results as `fun(*operands, **params)`."""
    lower = mlir.lower_fun(fun, multiple_results=True)

    def rule(context: Any, *operands: Any, **params: Any) -> Any:
        # Constants of `fun` would not match avals that vary over mesh axes.
        avals = [[new_aval(x.shape, x.dtype) for x in some] for some in (context.avals_in, context.avals_out)]
        return lower(context.replace(avals_in=avals[0], avals_out=avals[1]), *operands, **params)

    mlir.register_lowering(primitive, rule, platform=platform)


def compiled_function(primitive: Primitive) -> Callable[..., Sequence[Any]] | None:
    """The function `fun(*operands, **params) -> results` that jax compiles for a primitive on all platforms, if any."""
    if primitive.name == "call_hi_primitive":  # in jax 0.12 `jnp.searchsorted` and others, expanded by `jax.jit`
        expand: Callable[..., Sequence[Any]] = primitive.to_lojax
        return expand
    entry = getattr(private_mlir, "_lowerings", {}).get(primitive)
    own = getattr(private_mlir, "_platform_specific_lowerings", {})
    lower = getattr(entry, "rule", None)
    if getattr(lower, "__qualname__", "") != "lower_fun.<locals>.f_lowered" or any(
        primitive in of for of in own.values()
    ):
        return None

    closed_over = inspect.getclosurevars(lower).nonlocals  # type: ignore[arg-type]
    fun = closed_over.get("fun")
    if fun is None or "multiple_results" not in closed_over:  # in another version of jax
        return None
    return fun if closed_over["multiple_results"] else lambda *operands, **params: (fun(*operands, **params),)


def exported_text(code: bytes) -> str:
    """StableHLO from `jax.export`, without name scopes and source lines."""
    with private_mlir.make_ir_context():
        module = jax.export.deserialize(bytearray(code)).mlir_module(serialized=False)
        return private_mlir.module_to_string(module, enable_debug_info=False)


#: The attribute of a donated argument with the number of the result that takes over its memory.
_ALIAS = "tf.aliasing_output"


def set_memory_kinds(lowered: Any, *in_host: Sequence[bool]) -> None:
    """Mark arguments and results of a lowered function that are in host memory.

    Results take over donated arguments of the same memory: without kinds, jax pairs types alone.
    """
    module = lowered.compiler_ir()
    main = next(op for op in module.body.operations if str(getattr(op, "name", "")).strip('"') == "main")
    with module.context:
        for name, flags in zip(("arg_attrs", "res_attrs"), in_host, strict=True):
            if not flags:
                continue
            given = main.attributes[name] if name in main.attributes else [ir.DictAttr.get({})] * len(flags)
            marked = []
            for attributes, is_in_host in zip(given, flags, strict=True):
                kind = ir.StringAttr.get("pinned_host" if is_in_host else "device")
                marked.append(ir.DictAttr.get({x.name: x.attr for x in attributes} | {"mhlo.memory_kind": kind}))
            main.attributes[name] = ir.ArrayAttr.get(marked)
        if "arg_attrs" in main.attributes:
            main.attributes["arg_attrs"] = ir.ArrayAttr.get(_with_aliases_in_one_memory(main, *in_host))


def _with_aliases_in_one_memory(main: Any, in_host: Sequence[bool], out_in_host: Sequence[bool]) -> list[Any]:
    """Attributes of arguments. A donated argument whose result is in other memory gets a free result of its kind."""
    types: Any = ir.TypeAttr(main.attributes["function_type"]).value
    kinds = [(str(t), host) for t, host in zip(types.inputs, in_host, strict=True)]
    free = dict(enumerate((str(t), host) for t, host in zip(types.results, out_in_host, strict=True)))
    given = [{x.name: x.attr for x in attributes} for attributes in main.attributes["arg_attrs"]]
    aliased = {i: int(ir.IntegerAttr(one[_ALIAS]).value) for i, one in enumerate(given) if _ALIAS in one}
    wrong = [i for i, k in aliased.items() if out_in_host[k] != in_host[i]]
    for i, k in aliased.items():
        if i not in wrong:
            del free[k]
    for i in wrong:
        alias = given[i].pop(_ALIAS)
        other = next((k for k, kind in free.items() if kind == kinds[i]), None)
        if other is not None:
            given[i][_ALIAS] = ir.IntegerAttr.get(alias.type, other)
            del free[other]
    return [ir.DictAttr.get(one) for one in given]


def compiled_primitives() -> set[str]:
    """Names of all primitives that jax compiles on some platform."""
    own = getattr(private_mlir, "_platform_specific_lowerings", {})
    return {str(one.name) for table in (getattr(private_mlir, "_lowerings", {}), *own.values()) for one in table}


def new_aval(shape: Sequence[int], dtype: Any, operands: Sequence[Any] = ()) -> Any:
    """In a `shard_map`, the array varies over all mesh axes over which an operand varies."""
    varying = frozenset[str]().union(*(x.manual_axis_type.varying for x in operands))
    if not varying:
        return jax.core.ShapedArray(tuple(shape), dtype)
    like = next(x for x in operands if x.manual_axis_type.varying)
    manual = type(like.manual_axis_type)(varying=varying)
    sharding = like.sharding.update(spec=jax.P(*(None for _ in shape)))
    return jax.core.ShapedArray(tuple(shape), dtype, sharding=sharding, manual_axis_type=manual)


# ---- kernels of Pallas -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KernelArray:
    """An operand or result of a kernel.

    Attributes:
        blocks: block length in each dimension; None where blocks are not multiples of a length.
        index_map: closed jaxpr, from grid positions (and index operands) to block indices.
    """

    shape: tuple[int, ...]
    blocks: tuple[int | None, ...]
    index_map: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelGrid:
    """The grid of a `pallas_call`.

    Attributes:
        sizes: number of positions along each axis.
        vmapped: axes from `vmap`, which the body does not count.
        arrays: operands after the first `n_index`, then results.
        n_index: number of leading operands that index maps read.
        n_scratch: number of scratch arrays, the last operands of the body.
        aliases: pairs (operand, result) that share memory.
        flops: the user's estimate, or 0.
        is_plain: whether these fields are complete.
    """

    sizes: tuple[int, ...]
    vmapped: tuple[int, ...]
    arrays: tuple[KernelArray, ...]
    n_index: int
    n_results: int
    n_scratch: int
    aliases: tuple[tuple[int, int], ...]
    flops: float
    is_plain: bool


def kernel_grid(params: Mapping[str, Any]) -> KernelGrid:
    mapping = params["grid_mapping"]
    hooks = (mapping.grid_names, mapping.get_grid_indices, mapping.local_grid_env, params.get("mesh"))
    is_static = all(isinstance(size, int) for size in mapping.grid)
    cost = params.get("cost_estimate")
    return KernelGrid(
        sizes=tuple(mapping.grid) if is_static else (),
        vmapped=tuple(mapping.vmapped_dims),
        arrays=tuple(
            KernelArray(tuple(own.array_aval.shape), tuple(map(_block_length, own.block_shape)), own.index_map_jaxpr)
            for own in mapping.block_mappings
        ),
        n_index=mapping.num_index_operands,
        n_results=mapping.num_outputs,
        n_scratch=len(mapping.scratch_avals),
        aliases=tuple(tuple(pair) for pair in params["input_output_aliases"]),
        flops=float(cost.flops) if cost is not None else 0.0,
        is_plain=is_static and bool(mapping.grid) and all(hook is None for hook in hooks),
    )


def _block_length(block: Any) -> int | None:
    if isinstance(block, int):
        return block
    match type(block).__name__:
        case "Blocked":
            length: int = block.block_size
            return length
        case "Squeezed":
            return 1
    return None


def written_operands(body: Any) -> set[int]:
    """Numbers of operands that a kernel's body writes; 0 for an unknown one."""
    numbers = {var: i for i, var in enumerate(body.invars)}
    found = set()
    for effect in body.effects:
        if type(effect).__name__ in ("WriteEffect", "AccumEffect"):
            source = getattr(effect, "input", getattr(effect, "input_index", 0))
            found.add(source if isinstance(source, int) else numbers.get(source, 0))
    return found


def local_kernel_params(
    params: Mapping[str, Any], sizes: tuple[int, ...], shapes: Sequence[tuple[int, ...]]
) -> dict[str, Any]:
    """Parameters of a `pallas_call` on a grid of these sizes, for arrays of these shapes."""
    mapping = params["grid_mapping"]
    arrays = tuple(
        own.replace(array_aval=own.array_aval.update(shape=shape))
        for own, shape in zip(mapping.block_mappings, shapes, strict=True)
    )
    results = shapes[len(shapes) - mapping.num_outputs :]
    out_avals = tuple(aval.update(shape=shape) for aval, shape in zip(params["out_avals"], results, strict=True))
    local = dict(params, grid_mapping=mapping.replace(grid=sizes, block_mappings=arrays), out_avals=out_avals)

    cost = params.get("cost_estimate")
    if cost is not None:
        part, whole = math.prod(sizes), math.prod(mapping.grid)
        changes = {
            one.name: value * part // whole
            for one in fields(cost)
            if isinstance(value := getattr(cost, one.name), int) and not isinstance(value, bool)
        }
        local["cost_estimate"] = replace(cost, **changes)
    return local


# ---- attention of cuDNN ----------------------------------------------------------------------------------------------


def cudnn_version() -> int | None:
    """90701 for cuDNN 9.7.1; None without cuDNN, or with an unknown interface in jax."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo as cudnn
        from jax._src.lib import cuda_versions

        is_known = all(
            unused_parameters(getattr(cudnn, f"_dot_product_attention_{name}_impl")) is not None
            for name in ("fwd", "bwd")
        )
        return None if cuda_versions is None or not is_known else int(cuda_versions.cudnn_get_version())
    except (ImportError, AttributeError, RuntimeError):
        return None


#: Parameters in all versions of jax; in some versions, with their value for "unused".
_CUDNN_PARAMETERS = frozenset(
    (
        *("query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets"),
        *("page_table_k", "page_table_v", "activation", "fwd_output", "grad_output", "scale", "seed", "dropout_rate"),
        *("variadic_args", "mask_type", "layout", "sliding_window_length", "is_training"),
    )
)
_CUDNN_UNUSED: Mapping[str, Any] = MappingProxyType({"score_mod": None, "score_mod_args": ()})


def unused_parameters(compute: Callable[..., Any]) -> dict[str, Any] | None:
    """Parameters that minialpa does not use, with their values; None if some are unknown."""
    names = inspect.signature(compute).parameters.keys() - _CUDNN_PARAMETERS
    return {name: _CUDNN_UNUSED[name] for name in names} if names <= _CUDNN_UNUSED.keys() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CudnnAttention:
    """An attention whose query i sees keys j <= i if causal, and with a window only keys j > i - window."""

    scale: float
    is_causal: bool
    window: int | None

    def params(self, compute: Callable[..., Any]) -> dict[str, Any]:
        """For `compute`, jax's private function of this attention or its gradient."""
        from jax._src.cudnn.fused_attention_stablehlo import AttentionLayout, MaskType

        return {
            "scale": self.scale,
            "seed": 0,
            "dropout_rate": 0.0,
            "variadic_args": (False, False),
            "mask_type": MaskType.CAUSAL if self.is_causal else MaskType.NO_MASK,
            "layout": AttentionLayout.BTNH.value,
            "sliding_window_length": self.window,
            **(unused_parameters(compute) or {}),
        }


def cudnn_attention(query: Any, key: Any, value: Any, attention: CudnnAttention) -> tuple[Any, Any]:
    """out [b t n d] and logsumexp [b n t] of query [b t n d] and key and value [b s m d], n a multiple of m."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    compute: Any = cudnn._dot_product_attention_fwd_impl
    absent = [jax.numpy.zeros(0, query.dtype)] * 7
    out, logsumexp = compute(query, key, value, *absent, is_training=True, **attention.params(compute))
    return out, logsumexp


def cudnn_attention_gradient(
    operands: Sequence[Any], out: Any, logsumexp: Any, out_bar: Any, attention: CudnnAttention
) -> Sequence[Any]:
    """The cotangents of query, key and value. Shapes: see `cudnn_attention`."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    compute: Any = cudnn._dot_product_attention_bwd_impl
    absent = [jax.numpy.zeros(0, operands[0].dtype)] * 7
    cotangents: Sequence[Any] = compute(*operands, *absent, logsumexp, out, out_bar, **attention.params(compute))
    return cotangents


# ---- memory of arrays ------------------------------------------------------------------------------------------------


def memory_of(array: jax.Array) -> tuple[int, int]:
    return array.unsafe_buffer_pointer(), array.on_device_size_in_bytes()


def addresses_of(array: jax.Array) -> set[int]:
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


# ---- typed keys that are elsewhere -----------------------------------------------------------------------------------


def class_of_remote_keys(of_arrays: type) -> type:
    """A subclass of `of_arrays`, remote arrays, that functions of jax accept as typed keys and read by `_fetch`.

    Returns `of_arrays` if jax has other classes of keys.
    """
    try:
        from jax._src.core import pytype_aval_mappings
        from jax._src.interpreters.pxla import shard_arg_handlers
        from jax._src.random import prng
        from jax._src.tree_util import dispatch_registry

        keys_of_jax: Any = prng.PRNGKeyArray
        bases: Any = (of_arrays, keys_of_jax)

        class RemoteKeys(*bases):  # type: ignore[misc]
            shape: Any = ()
            dtype: Any = None
            _consumed = False

            @property
            def aval(self) -> Any:
                return jax.core.ShapedArray(self.shape, self.dtype)

            @property
            def _base_array(self) -> Any:
                return self._fetch()._base_array

            @property
            def _impl(self) -> Any:
                return self.dtype._impl

            def copy(self) -> Any:
                return self._fetch().copy()

            def __eq__(self, other: Any) -> Any:
                return self._fetch() == other

            def __ne__(self, other: Any) -> Any:
                return self._fetch() != other

        pytype_aval_mappings[RemoteKeys] = pytype_aval_mappings[keys_of_jax]
        shard_arg_handlers[RemoteKeys] = shard_arg_handlers[keys_of_jax]
        dispatch_registry.register_node(
            RemoteKeys,
            lambda keys: ((keys._base_array,), keys._impl),
            lambda impl, arrays: keys_of_jax(impl, arrays[0]),
        )
    except (ImportError, AttributeError, KeyError, TypeError):
        return of_arrays
    return RemoteKeys


# ---- collectives of CPUs ---------------------------------------------------------------------------------------------


def bind_gloo(ip: str) -> None:
    """Make the CPU backend use gloo on `ip`, after `jax.distributed.initialize` and before the backend starts.

    By default gloo binds the address of the host name, on many machines the loopback or another network.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        from jax._src import distributed, xla_bridge
        from jax._src.lib import _jax  # type: ignore[attr-defined]
        from jax.extend.backend import register_backend_factory

        collectives = _jax.make_gloo_tcp_collectives(distributed_client=distributed.global_state.client, hostname=ip)
        make_client = functools.partial(xla_bridge.make_cpu_client, collectives=collectives)
        register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)
    except (ImportError, AttributeError, TypeError):  # in another version of jax
        return
