"""Have Numba compile a kernel of `cpu` to machine code that runs without Numba.

To what Numba makes, an entry is added that takes arrays as they lie in memory, and the functions
of Numba's runtime that kernels call, for the arrays they make themselves. All of it is one object
file, which asks the process only for what every C library has.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.np.numpy_support import as_dtype, from_dtype

from dare.kernels import cpu
from dare.kernels.kept import Code

WORD, WORD32, POINTER = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
DATA, DIMENSIONS, STRIDES = 0, 16, 24
"""Where an array has them, counted in bytes from where the head of every object ends."""
INFO_BYTES, INFO_DATA = 48, 24
"""What Numba's runtime keeps before the data of an array: a count of references first, and here
where the data are."""


def compile_kernel(name: str, described: Sequence[str]) -> Code:
    """Compile a kernel for arguments of these types, as `native.describe` calls them.

    Without machine code if it needs more than there will be: then only Numba can run it.
    """
    options: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    compiler: Any = njit(nogil=True, error_model="numpy", **options)(getattr(cpu, name).py_func)
    arguments = tuple(_numba_type(text) for text in described)
    compiler.compile(arguments)
    compiled = compiler.overloads[arguments]
    library = compiled._asdict()["library"]
    symbol = "dare " + " ".join([name, *described])
    module = binding.parse_assembly(str(_entry(symbol, compiled, arguments)))
    module.link_in(library._final_module, preserve=True)
    if _foreign_functions(module) or WORD.width != 8 * ctypes.sizeof(ctypes.c_void_p):
        return Code(symbol, [], [], False, b"")
    for part in (*module.functions, *module.global_variables):
        if not part.is_declaration and part.name != symbol:
            part.linkage = "internal"  # kernels must not meet each other's
    returned = compiled.signature.return_type
    parts = _parts(returned)
    return Code(
        symbol,
        ["c_double" if isinstance(kind, types.Float) else "c_int64" for kind in arguments],
        [_c_name(kind) for kind in parts],
        isinstance(returned, types.BaseTuple),
        library.codegen._tm.emit_object(module),
    )


def _foreign_functions(module: Any) -> set[str]:
    """What is called and not there, besides what every C library has."""
    called = {function.name for function in module.functions if function.is_declaration}
    return {name for name in called - {"malloc", "free"} if not name.startswith("llvm.")}


def _numba_type(text: str) -> Any:
    """Make Numba's type of a description.

    >>> _numba_type("float32 2 C"), _numba_type("int64")
    (Array(float32, 2, 'C', False, aligned=True), int64)
    """
    dtype, *words = text.split()
    element = from_dtype(np.dtype(dtype))
    if not words:
        return element
    order: Any
    dimensions, order, *unaligned = words
    return types.Array(element, int(dimensions), order, aligned=not unaligned)


def _parts(returned: Any) -> list[Any]:
    if isinstance(returned, types.BaseTuple):
        return [*returned]  # type: ignore[misc]
    return [] if returned == types.none else [returned]


def _c_name(kind: Any) -> str:
    """Find what ctypes calls a type.

    >>> _c_name(types.int32), _c_name(types.float32), _c_name(types.boolean)
    ('c_int32', 'c_float', 'c_bool')
    """
    if isinstance(kind, types.Boolean):
        return "c_bool"
    return {types.float32: "c_float", types.float64: "c_double"}.get(kind, f"c_{kind.name}")


def _entry(symbol: str, compiled: Any, arguments: Sequence[Any]) -> ir.Module:
    """A module with a function of the process's C convention that calls a compiled kernel."""
    module = ir.Module()
    kinds = [ir.DoubleType() if isinstance(kind, types.Float) else WORD for kind in arguments]
    entry = ir.Function(module, ir.FunctionType(WORD32, [POINTER, *kinds]), symbol)
    builder = ir.IRBuilder(entry.append_basic_block())
    room, *given = entry.args
    passed = [room, builder.alloca(POINTER)]  # for what is returned, and for an error
    for value, kind in zip(given, arguments, strict=True):
        passed += _passed(builder, value, kind)
    convention = ir.FunctionType(WORD32, [value.type for value in passed])
    kernel = ir.Function(module, convention, compiled.fndesc.llvm_func_name)
    builder.ret(builder.call(kernel, passed))
    _add_runtime(module)
    return module


def _passed(builder: ir.IRBuilder, value: Any, kind: Any) -> list[Any]:
    """An argument as Numba's functions have it among themselves."""
    if isinstance(kind, types.Array):
        return _fields(builder, value, kind)
    if isinstance(kind, types.Float):
        return [builder.fptrunc(value, ir.FloatType()) if kind.bitwidth == 32 else value]
    bits = 8 if isinstance(kind, types.Boolean) else kind.bitwidth
    return [value if bits == 64 else builder.trunc(value, ir.IntType(bits))]


def _fields(builder: ir.IRBuilder, array: Any, kind: Any) -> list[Any]:
    """An array: no owner, how many elements of how many bytes, where, and its shape and strides."""

    def load(address: Any, offset: int, what: Any = WORD) -> Any:
        place = builder.add(address, WORD(offset))
        return builder.load(builder.inttoptr(place, what.as_pointer()))

    header = object.__basicsize__
    lists = load(array, header + DIMENSIONS), load(array, header + STRIDES)
    shape, strides = ([load(each, 8 * axis) for axis in range(kind.ndim)] for each in lists)
    elements = WORD(1)
    for length in shape:
        elements = builder.mul(elements, length)
    nothing = ir.Constant(POINTER, None)
    itemsize = WORD(as_dtype(kind.dtype).itemsize)
    data = load(array, header + DATA, POINTER)
    return [nothing, nothing, elements, itemsize, data, *shape, *strides]


def _add_runtime(module: ir.Module) -> None:
    """Numba's functions for memory, by `malloc` and `free`."""
    malloc = ir.Function(module, ir.FunctionType(POINTER, [WORD]), "malloc")
    free = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER]), "free")

    def define(name: str, returned: Any, *arguments: Any) -> tuple[ir.IRBuilder, Any]:
        function = ir.Function(module, ir.FunctionType(returned, arguments), name)
        function.linkage = "linkonce_odr"
        return ir.IRBuilder(function.append_basic_block()), function.args

    builder, (nbytes, alignment) = define("NRT_MemInfo_alloc_aligned", POINTER, WORD, WORD32)
    alignment = builder.zext(alignment, WORD)
    info = builder.call(malloc, [builder.add(builder.add(nbytes, alignment), WORD(INFO_BYTES))])
    address = builder.ptrtoint(info, WORD)
    with builder.if_then(builder.icmp_unsigned("!=", address, WORD(0))):
        unaligned = builder.add(address, builder.add(alignment, WORD(INFO_BYTES - 1)))
        data = builder.sub(unaligned, builder.urem(unaligned, alignment))
        for offset, value in {0: WORD(1), INFO_DATA: data}.items():
            place = builder.add(address, WORD(offset))
            builder.store(value, builder.inttoptr(place, WORD.as_pointer()))
    builder.ret(info)
    builder, arguments = define("NRT_Allocate", POINTER, WORD)
    builder.ret(builder.call(malloc, arguments))
    for name in ("NRT_MemInfo_call_dtor", "NRT_Free"):
        builder, arguments = define(name, ir.VoidType(), POINTER)
        builder.call(free, arguments)
        builder.ret_void()
