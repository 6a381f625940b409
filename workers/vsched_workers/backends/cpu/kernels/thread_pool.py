"""Thread pool of a rank, with work stealing: it divides the pieces of a kernel among threads.

A kernel passes a function and a number of pieces to `spread`. A *unit* is `grain` pieces. Every thread owns a *share*
of the units, the same in calls of equal size, so that it finds its weights in its own cache. A thread that has used up
its share steals units from the end of another one. So a preempted thread delays only the unit that it computes.
Results do not depend on the thread that computed them. The caller is thread 0.

Units are claimed with compare-and-swap. The *range* of a share, its unclaimed units, is one 64-bit word; the upper half
is the number of the call (the *epoch*). A late thread finds another epoch and claims nothing; a claimed unit keeps its
call open until DONE counts it, so the call's arguments do not change.

   63                 32 31        16 15         0
  +---------------------+------------+------------+
  |        epoch        |   first    |    stop    |     unclaimed units [first, stop)
  +---------------------+------------+------------+
                            owner takes   thieves take
                            first, +1     stop - 1, -1

A call, as its threads see it:

  caller:   write CALL .. SHARES, DONE = 0 -> write all ranges -> EPOCH += 1 -> wake sleepers -> claim and compute
  others:   spin on EPOCH, then sleep on it (futex) -> claim and compute -> DONE += units -> wake the caller
  caller:   DONE += units -> spin, then sleep, until DONE == units -> BUSY = 0

All accesses to shared words are sequentially consistent. A waiting thread spins for some microseconds, then sleeps in
the operating system (futex). A sleeping caller frees its core for a preempted thread that it waits for.

Source: Chase and Lev, "Dynamic Circular Work-Stealing Deque" (SPAA 2005), for owner and thief at two ends; Drepper,
"Futexes Are Tricky" (2011), for the sleep protocol.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call,no-any-return"

from __future__ import annotations

import platform
from typing import Any

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils

from vsched_workers.backends.cpu.kernels.compilation import compiled, emits

LINE = 64
"""Bytes of a cache line."""
EPOCH_AT, SLEEPERS_AT, DONE_AT, WAITING_AT, BUSY_AT, ACTIVE_AT, STOP_AT = (
    LINE * place for place in range(7)
)
"""Offsets of the words of the state, in bytes. Each has a cache line of its own to avoid false sharing."""
CALL_AT, ARGUMENTS_AT, PIECES_AT, GRAIN_AT, UNITS_AT, SHARES_AT = (
    LINE * 7 + 8 * place for place in range(6)
)
"""Offsets of the arguments of the current call, in one cache line: written by the caller only."""
SPIN_AT = LINE * 8
"""Offset of the spin time: nanoseconds that a thread spins before it sleeps."""
RANGES_AT = LINE * 9
"""Offset of the ranges of the threads, each in a cache line of its own."""
UNITS_MAX = 1 << 12
"""Maximum number of units of a call."""
_TOGETHER_VALUES = 1 << 15
"""Values in a piece of an elementwise kernel: about 20 microseconds, several times the wake-up time of a thread."""

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 202)
_FUTEX_WAIT, _FUTEX_WAKE = 128, 129  # futex operations private to a process
_ALL = 0x7FFFFFFF
"""Count for `wake`: all threads that sleep at an address."""
_LONG, _WORD = ir.IntType(64), ir.IntType(32)


def _at(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _LONG.as_pointer())


@emits(numba.intp, numba.intp)
def load(builder: Any, address: Any) -> Any:
    """Atomic load of a word."""
    return builder.load_atomic(_at(builder, address), ordering="seq_cst", align=8)


@emits(numba.void, numba.intp, numba.intp)
def store(builder: Any, address: Any, value: Any) -> None:
    """Atomic store of a word."""
    builder.store_atomic(value, _at(builder, address), ordering="seq_cst", align=8)


@emits(numba.intp, numba.intp, numba.intp)
def add(builder: Any, address: Any, value: Any) -> Any:
    """Atomic add; returns the previous value."""
    return builder.atomic_rmw("add", _at(builder, address), value, ordering="seq_cst")


@emits(numba.boolean, numba.intp, numba.intp, numba.intp)
def compare_and_swap(builder: Any, address: Any, expected: Any, value: Any) -> Any:
    """Replace a word if it equals `expected`; returns True if it was replaced."""
    found = builder.cmpxchg(_at(builder, address), expected, value, ordering="seq_cst")
    return builder.extract_value(found, 1)


@emits(numba.void)
def _pause(builder: Any) -> None:
    """Spin-wait hint: gives the other hardware thread of the core precedence."""
    if platform.machine() == "x86_64":
        name = "llvm.x86.sse2.pause"
        declared = ir.FunctionType(ir.VoidType(), [])
        builder.call(
            builder.module.globals.get(name) or ir.Function(builder.module, declared, name), []
        )


def _futex(builder: Any, address: Any, operation: int, value: Any) -> None:
    name, declared = "syscall", ir.FunctionType(_LONG, [_LONG], var_arg=True)
    call = builder.module.globals.get(name) or ir.Function(builder.module, declared, name)
    nothing = ir.Constant(_LONG, 0)
    number, code = ir.Constant(_LONG, _FUTEX), ir.Constant(_LONG, operation)
    builder.call(call, [number, address, code, value, nothing, nothing, nothing])


@emits(numba.void, numba.intp, numba.intp)
def _sleep_while(builder: Any, address: Any, value: Any) -> None:
    """Sleep until woken at this address; return at once if the lower half of the word differs from `value`.

    The futex compares 32 bits, in the operating system, so a wake between the caller's check and the sleep is not
    lost.
    """
    _futex(builder, address, _FUTEX_WAIT, value)


@emits(numba.void, numba.intp, numba.intp)
def wake(builder: Any, address: Any, count: Any) -> None:
    """Wake up to `count` threads that sleep at an address."""
    _futex(builder, address, _FUTEX_WAKE, count)


@emits(numba.intp)
def now_ns(builder: Any) -> Any:
    """Monotonic clock, nanoseconds."""
    name = "clock_gettime"
    kind = ir.ArrayType(_LONG, 2)
    declared = ir.FunctionType(_WORD, [_WORD, kind.as_pointer()])
    call = builder.module.globals.get(name) or ir.Function(builder.module, declared, name)
    time = cgutils.alloca_once(builder, kind)
    builder.call(call, [ir.Constant(_WORD, 1), time])
    found = builder.load(time)
    seconds, rest = builder.extract_value(found, 0), builder.extract_value(found, 1)
    return builder.add(builder.mul(seconds, ir.Constant(_LONG, 10**9)), rest)


_PIECES = ir.FunctionType(ir.VoidType(), [_LONG, _LONG, _LONG])


def _borrowed(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """Emit a copy of a value whose arrays have no reference count.

    numba counts references where compiled functions call each other, by atomic additions. All threads would add to the
    count of the same array, and its cache line would move between their cores: rotary embedding of 400 rows took two
    threads 2.3 times as long as one. The caller of `spread` holds the arrays until all pieces are computed.
    """
    if isinstance(kind, numba.types.Array):
        array = cgutils.create_struct_proxy(kind)(context, builder, value)
        array.meminfo = cgutils.get_null_value(array.meminfo.type)
        array.parent = cgutils.get_null_value(array.parent.type)
        return array._getvalue()  # noqa: SLF001 - numba has no public name for it
    tuples: Any = numba.types.BaseTuple  # untyped: its `types` are unknown to a type checker
    if isinstance(kind, tuples):
        parts = zip(kind.types, cgutils.unpack_tuple(builder, value), strict=True)
        borrowed = [_borrowed(context, builder, *part) for part in parts]
        return context.make_tuple(builder, kind, borrowed)
    return value


def _closure_signature(context: Any, function: Any, arguments: Any) -> Any:
    """Numba intrinsic: the address of a closure's code and of its arguments, as integers.

    Every piece function gets the same C signature, `void pieces(arguments, first, stop)`, so that `run_call` is
    compiled once and calls it through a pointer. The emitted function unpacks the tuple of arguments, which lives on
    the stack of the caller of `spread`, and calls the compiled overload.
    """
    by_range = function.dispatcher.py_func.__code__.co_argcount == len(arguments.types) + 2
    places = [numba.intp] * (1 + by_range)
    of_function = function.get_call_type(context, (*places, *arguments.types), {})

    def make_closure(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        overload = function.dispatcher.overloads[of_function.args]
        context.add_linking_libs([overload.library])
        module = builder.module
        call = ir.Function(module, _PIECES, module.get_unique_name("pieces"))
        call.linkage = "internal"
        # Never inlined: a second copy of the code might round differently.
        call.attributes.add("noinline")
        kept = cgutils.alloca_once_value(builder, values[1])
        inner = ir.IRBuilder(call.append_basic_block("entry"))
        all_arguments = inner.load(inner.inttoptr(call.args[0], values[1].type.as_pointer()))
        each = [
            _borrowed(context, inner, kind, inner.extract_value(all_arguments, place))
            for place, kind in enumerate(arguments.types)
        ]
        _, first, stop = call.args

        def compute(*pieces: Any) -> None:
            values = [*pieces, *each]
            context.call_internal_no_propagate(inner, overload.fndesc, of_function, values)

        if by_range:
            compute(first, stop)
        else:
            one = ir.Constant(_LONG, 1)
            with cgutils.for_range_slice(inner, first, stop, one) as (piece, _):
                compute(piece)
        inner.ret_void()
        found = [builder.ptrtoint(each, _LONG) for each in (call, kept)]
        return context.make_tuple(builder, numba.types.UniTuple(numba.intp, 2), found)

    return numba.types.UniTuple(numba.intp, 2)(function, arguments), make_closure


_closure_of: Any = numba.extending.intrinsic(_closure_signature)


@emits(numba.void, *[numba.intp] * 4)
def _call(builder: Any, function: Any, arguments: Any, first: Any, stop: Any) -> None:
    builder.call(builder.inttoptr(function, _PIECES.as_pointer()), [arguments, first, stop])


@compiled()
def _claim(range_at: int, epoch: int, from_end: bool) -> int:
    """Claim a unit of a range; returns -1 if none is left, or if the epoch has changed."""
    while True:
        word = load(range_at)
        first, stop = (word >> 16) & 0xFFFF, word & 0xFFFF
        if word >> 32 != epoch or first >= stop:
            return -1
        if compare_and_swap(range_at, word, word - 1 if from_end else word + (1 << 16)):
            return stop - 1 if from_end else first


@compiled()
def _compute_units(state: int, me: int, epoch: int) -> int:
    """Compute units of a call, first of the thread's own share, then of other shares, until all are claimed.

    Returns the number of computed units.
    """
    count = 0
    shares = load(state + SHARES_AT)
    for step in range(shares + 1):  # + 1: a thread without a share steals from all
        other = me if step == 0 else (me + step) % shares
        range_at = state + RANGES_AT + other * LINE
        while True:
            unit = _claim(range_at, epoch, step > 0)
            if unit < 0:
                break
            grain, pieces = load(state + GRAIN_AT), load(state + PIECES_AT)
            first = unit * grain
            arguments = load(state + ARGUMENTS_AT)
            _call(load(state + CALL_AT), arguments, first, min(first + grain, pieces))
            count += 1
    return count


@compiled()
def run_call(state: int, call: int, arguments: int, pieces: int, grain: int) -> None:
    """Compute all pieces on the active threads; on the calling thread alone if another call is in progress."""
    grain = max(grain, (pieces + UNITS_MAX - 1) // UNITS_MAX)
    units = (pieces + grain - 1) // grain
    shares = min(load(state + ACTIVE_AT), units)
    if shares < 2 or not compare_and_swap(state + BUSY_AT, 0, 1):
        _call(call, arguments, 0, pieces)
        return
    store(state + CALL_AT, call)
    store(state + ARGUMENTS_AT, arguments)
    store(state + PIECES_AT, pieces)
    store(state + GRAIN_AT, grain)
    store(state + UNITS_AT, units)
    store(state + SHARES_AT, shares)
    store(state + DONE_AT, 0)
    epoch = (load(state + EPOCH_AT) + 1) & 0x7FFFFFFF
    for thread in range(shares):
        first, stop = units * thread // shares, units * (thread + 1) // shares
        word = (epoch << 32) | (first << 16) | stop
        store(state + RANGES_AT + thread * LINE, word)
    store(state + EPOCH_AT, epoch)
    if load(state + SLEEPERS_AT):
        wake(state + EPOCH_AT, shares - 1)
    count = _compute_units(state, 0, epoch)
    add(state + DONE_AT, count)
    if load(state + DONE_AT) < units:
        _join(state, units)
    store(state + BUSY_AT, 0)


@compiled()
def _join(state: int, units: int) -> None:
    """Wait until all units are computed: spin first, then sleep."""
    until_ns = now_ns() + load(state + SPIN_AT)
    while load(state + DONE_AT) < units:
        for _ in range(16):
            _pause()
        if now_ns() >= until_ns:
            store(state + WAITING_AT, 1)
            while True:
                done = load(state + DONE_AT)
                if done >= units:
                    break
                _sleep_while(state + DONE_AT, done)
            store(state + WAITING_AT, 0)
            return


@compiled()
def _next_epoch(state: int, me: int, seen: int) -> int:
    """Wait for the next call that this thread takes part in; returns its epoch, or -1 if the pool stops.

    A thread beyond the active number sleeps on ACTIVE instead of EPOCH, so that calls do not wake it.
    """
    until_ns = now_ns() + load(state + SPIN_AT)
    while not load(state + STOP_AT):
        for _ in range(16):
            epoch = load(state + EPOCH_AT)
            if epoch != seen:
                return epoch
            _pause()
        active = load(state + ACTIVE_AT)
        if active <= me:
            _sleep_while(state + ACTIVE_AT, active)
        elif now_ns() >= until_ns:
            add(state + SLEEPERS_AT, 1)
            _sleep_while(state + EPOCH_AT, seen)
            add(state + SLEEPERS_AT, -1)
            until_ns = now_ns() + load(state + SPIN_AT)
    return -1


@compiled()
def work(state: int, me: int) -> None:
    """Main loop of a worker thread: take part in all calls until the pool stops."""
    epoch = -1
    while True:
        epoch = _next_epoch(state, me, epoch)
        if epoch < 0:
            return
        count = _compute_units(state, me, epoch)
        if count:
            units = load(state + UNITS_AT)
            if add(state + DONE_AT, count) + count >= units and load(state + WAITING_AT):
                wake(state + DONE_AT, 1)


@compiled()
def set_active_threads(state: int, threads: int) -> None:
    """Set the number of active threads from the next call on, and wake all sleeping threads."""
    store(state + ACTIVE_AT, threads)
    # Wake all: inactive threads may sleep here ahead of active ones, and all must see STOP (set by `threads.py`).
    wake(state + ACTIVE_AT, _ALL)
    wake(state + EPOCH_AT, _ALL)


# Compiled into each kernel, and stored on disk with it.
@numba.njit(nogil=True, error_model="numpy")
def spread(state: int, pieces: int, grain: int, function: Any, arguments: Any) -> None:
    """Compute all pieces on the threads of a pool, or on the calling thread if `state` is 0.

    Args:
        state: Address of the pool's state.
        pieces: Number of pieces.
        grain: Pieces of a unit: about 10 microseconds or more.
        function: Called with the index of each piece, and `arguments`; if it has one parameter more, once for each
            unit, with the index of its first piece, that after its last piece, and `arguments`.
        arguments: Tuple of further arguments.
    """
    call, at = _closure_of(function, arguments)
    if state == 0 or pieces <= grain:
        _call(call, at, 0, pieces)
    else:
        run_call(state, call, at, pieces, grain)


@compiled()
def rows_together(width: int) -> int:
    """Number of rows of `width` values in a piece of an elementwise kernel."""
    return max(_TOGETHER_VALUES // max(width, 1), 1)
