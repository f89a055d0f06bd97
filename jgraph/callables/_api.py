"""`make_graphed_callables`: checks the arguments, and compiles all executables before the first call."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias, get_args

from flax import linen, nnx

from jgraph.callables import _arguments as arguments
from jgraph.callables._arguments import OrderLike
from jgraph.callables._callable import Graphed, ParamGrads, interfaces_of
from jgraph.callables._compile import Executable, compile_tasks
from jgraph.callables._group import GraphedCallables
from jgraph.callables.shaped import Shaped, shape_callable
from jgraph.errors import CallableError, check_choice
from jgraph.precision.transform import FP8Function
from jgraph.schedule.action import Kind
from jgraph.types import JaxDevice, Params, Tree
from jgraph.xla.options import OptionValue

Function: TypeAlias = Callable[..., Tree] | FP8Function | nnx.Module | linen.Module
"""A callable: a function, an FP8 function or a Flax module."""

# Attributes of Flax modules that select inference.
_MODES = ("deterministic", "use_running_average")


def make_graphed_callables(
    callables: Function | tuple[Function, ...] | list[Function],
    params: Params,
    sample_args: Sequence[Tree],
    *,
    sample_kwargs: Mapping[str, Tree] | Sequence[Mapping[str, Tree] | None] | None = None,
    order: OrderLike | None = None,
    num_layers_per_chunk: int | Sequence[int] | None = None,
    delay_wgrad: bool | Sequence[bool] = False,
    reuse_buffers: bool = False,
    param_grads: ParamGrads = "owned",
    devices: Sequence[JaxDevice] | None = None,
    training: bool = True,
    compiler_options: Mapping[str, OptionValue] | None = None,
) -> GraphedCallables:
    """Compiles forward and backward of each callable once, as CUDA graphs that your code can call in any order.

    Like `jax.jit` of `jax.vjp`, but the backward is a separate call, every buffer has an owner, and wgrads can be delayed. The
    counterpart of the functions of the same name in PyTorch and Transformer Engine. Runs none of the callables, and donates no
    argument. `GraphedCallables.run` compiles an order on its first call.

    Args:
        callables: One callable, or a tuple in the order of the data: chunk by chunk, layer by layer. A callable is a pure
            function `fn(params, x, *extra, **kwargs) -> y` of trees of arrays, an FP8 function (`jgraph.fp8`), or a Flax module
            (NNX or Linen). x and y are floating; an x of integers has no gradient; `extra` and `kwargs` are not differentiated.
            Pass random keys as arguments.
        params: The parameters of each callable, trees of arrays or `jax.ShapeDtypeStruct`s; a tuple if `callables` is a tuple.
            For an NNX module, its `nnx.Param` state; for a Linen module, the first argument of `apply`. The parameters of an
            FP8 function are (params, state, weights). The gradient of the state is the state after the step, the maximum over
            microbatches. Stored, not copied, as the params of `run`.
        sample_args: (x, *extra) of each callable, with the shapes of a microbatch; a tuple of them if `callables` is a tuple.
            Only shapes and dtypes are read.
        sample_kwargs: Keyword arguments of each callable, or None; a tuple of dicts if `callables` is a tuple. Only shapes and
            dtypes are read.
        order: The order that `run` plays: signed numbers (`c` is the forward, `-c` the dgrad or full backward and `-c-0.5` the
            wgrad of chunk c, from 1), an Order, a Schedule, or one order per rank. None if the callables are only called one by
            one.
        num_layers_per_chunk: Number of callables per chunk of an order in signed numbers: one number for all chunks, or one per
            chunk. None means 1. An Order and a Schedule have their own numbers.
        delay_wgrad: True makes `wgrad` a separate call. One bool for all, or one per stage of the order (a chunk of a rank);
            without an order, one per callable. A callable without a delayed gradient has no wgrad in the order.
        reuse_buffers: True lets `run` donate a buffer to its last reader, so that a later action writes into it. This saves
            memory and needs an order. Single calls are not affected.
        param_grads: `owned` returns gradients as new arrays of the caller, in the dtype of the parameter, unless they are
            delayed. `aliased` accumulates all gradients in main_grad, float32 sums that stay in the same buffers, and returns
            `Borrowed` handles on them. Delayed gradients are always aliased.
        devices: A list with the device of each rank of the order, or with one device for all ranks. None uses the device of the
            params.
        training: False builds forwards only. A Flax NNX module must be in the same mode.
        compiler_options: XLA options by name, e.g. from `jgraph.compiler_options`; None for XLA's defaults.

    Returns:
        The graphed callables: `[i]` is callable i, and `run` plays the order.

    Raises:
        ConfigError: If `param_grads` is unknown.
        CallableError: If callables, params and samples do not match, an argument has a value that is not allowed, params are on
            several devices and `devices` is None, a Flax module has variables other than parameters or is in the wrong mode, a
            parameter is complex, y is not floating, or the call is inside a JAX transformation.
        OrderError: If the order cannot run, does not fit `delay_wgrad`, or has a wgrad of a callable without a delayed
            gradient.
        SplitError: If the backward of a callable cannot be split, for example because the result of a callback is read.
        CompilerOptionError: If XLA refuses an option.

    Examples:
        >>> params, x = jnp.ones((2, 3)), jnp.ones((4, 2))
        >>> graphed = jgraph.make_graphed_callables(lambda params, x: x @ params, params, (x,))
        >>> graphed[0]
        Graphed(0: forward, backward; float32[4, 2] -> float32[4, 3])
        >>> y = graphed[0](params, x)
        >>> gradient, dx = graphed[0].backward(jnp.ones_like(y))
    """
    check_choice("param_grads", param_grads, get_args(ParamGrads))
    fns = tuple(callables) if isinstance(callables, (tuple, list)) else (callables,)
    given: dict[str, Any] = {"params": params, "sample_args": sample_args, "sample_kwargs": sample_kwargs}
    if not isinstance(callables, (tuple, list)):
        given = {name: (values,) for name, values in given.items()}
    arguments.check_argument(len(fns) > 0, "callables", "`callables` is empty: must be a callable, or a tuple of callables")
    # Copied, so that the caller may change the lists later.
    delay_wgrad = tuple(delay_wgrad) if isinstance(delay_wgrad, Sequence) else delay_wgrad
    layers = tuple(num_layers_per_chunk) if isinstance(num_layers_per_chunk, Sequence) else num_layers_per_chunk
    every, args, kwargs = (arguments.each(name, values, len(fns)) for name, values in given.items())
    samples = [(every[i], *arguments.sample_of(i, args[i], kwargs[i])) for i in range(len(fns))]
    arguments.check_concrete("make_graphed_callables", samples)
    schedule, delayed = arguments.schedule_of(order, layers, delay_wgrad, len(fns))
    wrong = "`reuse_buffers` is True without an order: pass `order`, such as [1, -1]"
    arguments.check_argument(schedule is not None or not reuse_buffers, "reuse_buffers", wrong)
    wrong = "`training` is False, which builds no backward: must be True with `order` or `delay_wgrad`"
    arguments.check_argument(training or (schedule is None and not any(delayed)), "training", wrong)
    placed = arguments.homes(schedule, devices, every)
    checks = [_mode_check(fn, i, training) for i, fn in enumerate(fns)]
    for check in filter(None, checks):
        check()
    wrong = f"`compiler_options` is {type(compiler_options).__name__}: must be a mapping of XLA options to values"
    arguments.check_argument(isinstance(compiler_options, Mapping | None), "compiler_options", wrong)
    options = dict(compiler_options or {})

    # Layers with the same function and shapes are traced once. Each layer has separate executables, so that its command buffers
    # find every array at the address of the previous call.
    traced: dict[tuple[int, Hashable], Shaped] = {}
    shaped = []
    for i, (fn, sample) in enumerate(zip(fns, samples, strict=True)):
        name = (id(fn), arguments.signature(sample))
        if name not in traced:
            traced[name] = shape_callable(_function(fn, i), i, *sample, device=placed[i])
        shaped.append(replace(traced[name], index=i, device=placed[i]))
    if schedule is not None:
        arguments.check_wgrads(schedule, shaped)
        _check_chain(shaped)
    interfaces = [interfaces_of(*one, training=training, param_grads=param_grads) for one in zip(shaped, delayed, strict=True)]
    executables = iter(compile_tasks([io for one in interfaces for io in one.values()], shaped, options))
    parts: list[dict[Kind, Executable]] = [{kind: next(executables) for kind in one} for one in interfaces]
    graphed = tuple(map(Graphed, shaped, parts, arguments.most_waiting(schedule, len(fns)), checks))
    return GraphedCallables(
        graphed,
        every,
        schedule,
        parse=partial(arguments.schedule_of, layers=layers, delay_wgrad=delay_wgrad, count=len(fns)),
        reuse_buffers=reuse_buffers,
        options=options,
    )


def _check_chain(shaped: Sequence[Shaped]) -> None:
    """Raises CallableError if the x of a callable does not match the y of the previous one."""
    for before, after in pairwise(shaped):
        if not after.takes_gradient:
            raise CallableError(f"callable {after.index} takes integers for x: only the first callable of an order may")
        if texts := arguments.differences(after.x, before.y.shapes(), "y", None):
            wrong = f"callable {after.index} does not take the output of callable {before.index}: {'; '.join(texts)}"
            raise CallableError(wrong, mismatches=tuple(texts))


def _function(fn: Function, i: int) -> Callable[..., Tree] | FP8Function:
    """Returns `fn(params, x, *extra, **kwargs)` for a function or a Flax module. FP8 functions are returned unchanged."""
    if isinstance(fn, linen.Module):
        return fn.apply
    if not isinstance(fn, nnx.Module):
        wrong = f"callable {i} is {type(fn).__name__}: must be a function or a Flax module"
        arguments.check_argument(isinstance(fn, FP8Function) or callable(fn), "callables", wrong)
        return fn
    graphdef, _, rest = nnx.split(fn, nnx.Param, ...)
    if kinds := sorted({type(variable).__name__ for _, variable in nnx.to_flat_state(rest)}):
        raise CallableError(
            f"callable {i} has variables besides its parameters ({', '.join(kinds)}), which a compiled call cannot update; "
            f"write a function fn(params, x, *extra) that takes them as arguments"
        )
    return lambda params, x, *extra, **kwargs: nnx.merge(graphdef, params)(x, *extra, **kwargs)


def _mode_check(fn: Function, i: int, training: bool) -> Callable[[], None] | None:
    """Returns a function that raises CallableError if a module is not in the mode `training`; None if it has no modes."""
    modules = list(nnx.iter_modules(fn)) if isinstance(fn, nnx.Module) else []
    switches = [
        (path, module, name) for path, module in modules for name in _MODES if isinstance(getattr(module, name, None), bool)
    ]

    def check() -> None:
        for path, module, name in switches:
            if getattr(module, name) is training:
                place = "/".join(map(str, path)) or "the module"
                wrong = f"{place} has {name}={training}, but the callable was built with training={training}"
                mode = "train" if training else "eval"
                raise CallableError(f"callable {i}: {wrong}; call .{mode}() on the module")

    return check if switches else None
