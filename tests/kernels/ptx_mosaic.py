"""What `ptx` lacks to run the PTX that Mosaic makes of the row kernels: bulk copies, their barriers, FP8 conversions.

A bulk copy happens at once. A barrier counts arrivals and bytes as the chip does, and waiting for a phase that is not
complete is an error, since nothing else could complete it any more.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import ptx
from ptx import Fault

_WAIT = re.compile(r"\{\s*\.reg \.pred\s+P1;.*?(mbarrier\.try_wait\.[^;]*;).*?DONE:\s*\}", re.DOTALL)
_PAIR = re.compile(r"\{\s*\.reg \.b16 result_pair<\d>;(.*?;)\s*\}", re.DOTALL)


class Kernel(ptx.Kernel):
    """An entry of a PTX module of Mosaic. An array that is read and written is one parameter."""

    def __init__(self, text: str) -> None:
        head, body = text[: text.index("{")], text[text.index("{") :]
        head = re.sub(r"\.maxntid (\d+), 1, 1", r".reqntid \1", head)
        body = re.sub(r"^\s*\.(?:loc|shared)\b[^\n]*", "", body, flags=re.MULTILINE)
        body = _PAIR.sub(r"\1", _WAIT.sub(r"\1", body)).replace("result_pair", "%result_pair")
        super().__init__(head + body)

    def run(self, arrays: Sequence[ptx.Array], grid: tuple[int, int]) -> None:
        """Runs every block. `arrays`: the parameters."""
        distinct = list({id(a): a for a in arrays}.values())
        bases = {id(a): (i + 1) << 40 for i, a in enumerate(distinct)}
        if len(distinct) != len(self.params):
            raise Fault(f"{self.name} takes {len(self.params)} arrays, not {len(distinct)}")
        memory = {bases[id(a)]: a for a in distinct}
        params = {name: bases[id(a)] for name, a in zip(self.params, distinct, strict=True)}
        for x in range(grid[0]):
            _Block(self, memory, params, x).run()


@dataclasses.dataclass
class _Barrier:
    """An mbarrier: arrivals and bytes that its phase still waits for."""

    count: int
    pending: int
    bytes: int = 0
    phases: int = 0

    def settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phases = self.count, self.phases + 1


class _Block(ptx._Blocks):
    """One block, since blocks take different branches."""

    def __init__(self, kernel: Kernel, memory: dict[int, ptx.Array], params: dict[str, int], block: int) -> None:
        super().__init__(kernel, memory, params, 1, 0)
        self.special["%ctaid.x"] = np.full(self.n, block, np.uint64)
        self.special["__dynamic_shmem__0"] = np.full(self.n, ptx._SHARED, np.uint64)
        self.barriers: dict[int, _Barrier] = {}

    def _execute(self, step: Any, on: np.ndarray) -> None:
        name, *rest = step.opcode
        operands = step.operands
        if name == "fence" or (name == "cp" and rest[2] in ("commit_group", "wait_group")):
            return
        if name == "elect":
            register, predicate = operands[0].split("|")
            thread = np.arange(self.n)
            self._set(register, thread - thread, on)
            self._set(predicate, thread % ptx._WARP == 0, on)
        elif name == "cp":
            self._bulk(rest[2:], operands, on)
        elif name == "mbarrier":
            self._barrier(rest, operands, on)
        else:
            super()._execute(step, on)

    def _one(self, operand: str, on: np.ndarray, kind: str = "u64") -> int:
        """The value that the threads agree on."""
        values = np.unique(self._get(operand.strip("[] "), kind)[on])
        if len(values) != 1:
            raise Fault(f"threads differ in {operand}")
        return int(values[0])

    def _bulk(self, way: list[str], operands: list[str], on: np.ndarray) -> None:
        if not on.any():
            return
        if on.sum() != 1:
            raise Fault(f"{on.sum()} threads start the same bulk copy")
        target, source, size = (self._one(operand, on) for operand in operands[:3])
        size &= 0xFFFFFFFF
        into_shared = way[0] == "shared::cta"
        (to, at_to), (of, at_of) = self._place(target, into_shared), self._place(source, not into_shared)
        if target % 16 or source % 16 or size % 16:
            raise Fault(f"a bulk copy of {size} bytes from {source:#x} to {target:#x} is not aligned to 16 bytes")
        if at_to + size > to.size or at_of + size > of.size:
            raise Fault(f"{self.kernel.name}: a bulk copy of {size} bytes outside of an array")
        to.put(at_to, of.bytes(at_of, size))
        to.stored, of.loaded = to.stored + size, of.loaded + size
        if into_shared:
            barrier = self.barriers[self._one(operands[3], on) & 0xFFFFFFFF]
            barrier.bytes -= size
            barrier.settle()

    def _place(self, address: int, shared: bool) -> tuple[ptx.Array, int]:
        base = ptx._SHARED if shared else address >> 40 << 40
        if base not in self.memory:
            raise Fault(f"{self.kernel.name}: {address:#x} is no array's")
        return self.memory[base], address & (0xFFFFFFFF if shared else (1 << 40) - 1)

    def _barrier(self, rest: list[str], operands: list[str], on: np.ndarray) -> None:
        if not on.any():
            return
        if rest[0] == "init":
            count = self._one(operands[1], on, "u32")
            self.barriers[self._one(operands[0], on) & 0xFFFFFFFF] = _Barrier(count, count)
        elif rest[:2] == ["arrive", "expect_tx"]:
            barrier = self.barriers[self._one(operands[1], on) & 0xFFFFFFFF]
            barrier.bytes += int(self._get(operands[2], "u32")[on].sum())
            barrier.pending -= int(on.sum())
            if barrier.pending < 0:
                raise Fault("more arrivals than a barrier counts")
            barrier.settle()
        elif rest[:2] == ["try_wait", "parity"]:
            barrier = self.barriers[self._one(operands[1], on) & 0xFFFFFFFF]
            if barrier.phases % 2 == self._one(operands[2], on, "u32") % 2:
                raise Fault("a wait that never ends")
        else:
            raise Fault(f"unknown mbarrier.{'.'.join(rest)}")

    def _compute(self, name: str, rest: list[str], operands: list[str]) -> np.ndarray:
        if name == "fma":
            a, b, c = (self._get(o, "f32").astype(np.longdouble) for o in operands)
            return (a * b + c).astype(np.float32)
        if name == "rcp":
            exact = 1 / self._get(operands[0], "f32")
            return np.nextafter(exact, np.float32(np.inf), dtype=np.float32)  # an approximation: as bad as may be
        return super()._compute(name, rest, operands)

    def _convert(self, rest: list[str], operands: list[str]) -> np.ndarray:
        formats = {"e4m3x2": (ml_dtypes.float8_e4m3fn, 448), "e5m2x2": (ml_dtypes.float8_e5m2, 57344)}
        if rest[-1] != "f32" or rest[-2] not in formats:
            return super()._convert(rest, operands)
        dtype, largest = formats[rest[-2]]
        codes = []
        for operand in operands:  # the odd one of a pair may be anything
            value = self._get(operand, "f32") if operand in self.registers else np.full(self.n, np.nan, np.float32)
            code = np.clip(value, -largest, largest).astype(dtype).view(np.uint8)
            codes.append(np.where(np.isnan(value), 0x7F, code).astype(np.uint64))
        return codes[1] | codes[0] << np.uint64(8)

    def _access(self, name: str, rest: list[str], operands: list[str], on: np.ndarray) -> None:
        if rest[0].startswith("param"):
            return super()._access(name, rest, operands, on)
        space = rest[0] if rest[0] in ("global", "shared") else "global"  # a generic address else
        place = 1 if name == "ld" else 0
        register, _, offset = operands[place].strip("[] ").partition("+")
        address = self._get(register, "u64") + np.uint64(int(offset or 0) % 2**64)
        if space == "shared":
            address = address & np.uint64(0xFFFFFFFF) | np.uint64(ptx._SHARED)
        self.registers["%address"] = address
        operands = [*operands]
        operands[place] = "[%address]"
        return super()._access(name, [space, *rest[rest[0] == space :]], operands, on)
