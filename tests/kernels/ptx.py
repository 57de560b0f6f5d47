"""Runs the PTX of a compiled kernel on the CPU, all threads of a block at a time: what the machine code would do.

Enough of PTX ISA 8 and 9 for what Triton makes of the row kernels. All threads take each instruction together, so that
barriers mean nothing and races stay unseen. Memory is a set of arrays, some of them huge and sparse; an access outside
of the one that its pointer came from is an error, as is an instruction that this file does not know.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence

import numpy as np

PAGE = 1 << 12
_WARP = 32
_SHARED, _SHARED_BYTES = 0x7F << 40, 1 << 18  # where the blocks' shared memory lies, so many bytes each


class Fault(Exception):
    """The kernel did what no kernel may do."""


class Array:
    """Bytes of an array in the kernel's memory: those given, else zeros. Only pages that are touched exist."""

    def __init__(self, size: int, data: np.ndarray | None = None) -> None:
        self.size, self.pages = size, {}
        self.loaded = self.stored = 0  # bytes, those that threads of a warp access together counted once
        if data is not None:
            flat = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
            for start in range(0, size, PAGE):
                page = np.zeros(PAGE, np.uint8)
                page[: len(flat[start : start + PAGE])] = flat[start : start + PAGE]
                self.pages[start // PAGE] = page

    @classmethod
    def of(cls, data: np.ndarray) -> "Array":
        return cls(data.nbytes, data)

    def read(self, at: np.ndarray, size: int) -> np.ndarray:
        """`[len(at), size]` bytes at those offsets, none across the end of a page."""
        out = np.empty((len(at), size), np.uint8)
        for page, mine, where in self._pages(at, size):
            out[mine] = page[where]
        return out

    def write(self, at: np.ndarray, data: np.ndarray) -> None:
        """Stores the rows of `data` at those offsets."""
        for page, mine, where in self._pages(at, data.shape[1]):
            page[where] = data[mine]

    def _pages(self, at: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        pages = at // PAGE
        for number in np.unique(pages):
            mine = np.flatnonzero(pages == number)
            yield self._page(int(number)), mine, (at[mine] % PAGE)[:, None] + np.arange(size)

    def put(self, at: int, data: np.ndarray) -> None:
        """Writes any range."""
        while len(data):
            page, offset = divmod(at, PAGE)
            part = data[: PAGE - offset]
            self._page(page)[offset : offset + len(part)] = part
            at, data = at + len(part), data[len(part) :]

    def _page(self, page: int) -> np.ndarray:
        if page not in self.pages:
            self.pages[page] = np.zeros(PAGE, np.uint8)
        return self.pages[page]

    def bytes(self, at: int, size: int) -> np.ndarray:
        """A copy of any range."""
        first, last = at // PAGE, (at + size - 1) // PAGE
        whole = np.concatenate([self._page(page) for page in range(first, last + 1)])
        return whole[at - first * PAGE :][:size].copy()

    def copy(self) -> "Array":
        """Another array of the same bytes."""
        new = Array(self.size)
        new.pages = {page: data.copy() for page, data in self.pages.items()}
        return new

    def touched(self) -> list[int]:
        """Offsets of the pages that hold anything but zeros."""
        return [page * PAGE for page, data in sorted(self.pages.items()) if data.any()]


@dataclasses.dataclass
class _Instruction:
    opcode: list[str]
    operands: list[str]
    guard: str | None  # a predicate
    negated: bool


class Kernel:
    """An entry of a PTX module."""

    def __init__(self, text: str) -> None:
        self.name = re.search(r"\.entry (\w+)\(", text)[1]
        self.params = re.findall(rf"\b{self.name}_param_\d+", text[: text.index("{")])
        self.threads = int(re.search(r"\.reqntid (\d+)", text)[1])
        self.body: list[_Instruction] = []
        self.labels: dict[str, int] = {}
        self.tables: dict[str, list[str]] = {}
        code = re.sub(r"//[^\n]*", "", text[text.index("{") + 1 : text.rindex("}")])
        code = re.sub(r"^([\w$]+):(?!\s*\.branchtargets)", r"\1:;", code, flags=re.MULTILINE)
        for statement in self._statements(code):
            self._parse(statement)

    @staticmethod
    def _statements(code: str) -> Sequence[str]:
        return [" ".join(part.split()) for part in code.split(";") if part.strip()]

    def _parse(self, text: str) -> None:
        if text.endswith(":"):
            self.labels[text[:-1]] = len(self.body)
        elif match := re.match(r"([\w$]+): \.branchtargets (.*)", text):
            self.tables[match[1]] = re.split(r",\s*", match[2])
        elif not text.startswith((".reg", ".loc", ".pragma")):
            match = re.match(r"(?:@(!?)(%p\d+) )?([\w.:]+) ?(.*)", text)
            if match is None:
                raise Fault(f"cannot read {text!r}")
            operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", match[4])
            self.body.append(
                _Instruction(match[3].split("."), [o.strip() for o in operands], match[2], match[1] == "!")
            )

    def run(self, arrays: Sequence[Array], grid: tuple[int, int]) -> None:
        """Runs every block. `arrays`: the parameters; the same array may come twice (in and out)."""
        if len(arrays) > len(self.params):
            raise Fault(f"{self.name} takes {len(self.params)} arrays, not {len(arrays)}")
        distinct = list({id(a): a for a in arrays}.values())
        bases = {id(a): (i + 1) << 40 for i, a in enumerate(distinct)}
        memory = {bases[id(a)]: a for a in distinct}
        values = {name: bases[id(a)] for name, a in zip(self.params, arrays, strict=False)}
        for y in range(grid[1]):
            _Blocks(self, memory, values, grid[0], y).run()


def _float(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32).view(np.float32)


def _bits(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).view(np.uint32).astype(np.uint64)


def _off_by_two(quotient: np.ndarray) -> np.ndarray:
    """As wrong as `div.full.f32` may be: two ulp, up in one thread and down in the next."""
    bits = quotient.astype(np.float32).view(np.int32)
    return (bits + np.where(np.arange(len(bits)) % 2, 2, -2)).astype(np.int32).view(np.float32)


_SIZES = {"b8": 1, "u8": 1, "b16": 2, "u16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4, "b64": 8, "u64": 8}


class _Blocks:
    """All threads of a row of blocks. A register is 64 bits of each; an instruction uses what its type says."""

    def __init__(self, kernel: Kernel, memory: dict[int, Array], params: dict[str, int], blocks: int, y: int) -> None:
        self.kernel, self.params = kernel, params
        self.n = kernel.threads * blocks
        self.registers: dict[str, np.ndarray] = {}
        self.memory = memory | {_SHARED: Array(blocks * _SHARED_BYTES)}
        block, thread = np.divmod(np.arange(self.n, dtype=np.uint64), np.uint64(kernel.threads))
        self.special = {"%tid.x": thread, "%ctaid.x": block, "%ctaid.y": np.full(self.n, y, np.uint64)}
        self.special["global_smem"] = np.uint64(_SHARED) + block * np.uint64(_SHARED_BYTES)

    def run(self) -> None:
        at, body = 0, self.kernel.body
        while at < len(body):
            step = body[at]
            on = np.ones(self.n, bool)
            if step.guard is not None:
                on = self.registers[step.guard].astype(bool) ^ step.negated
            name = step.opcode[0]
            if name in ("bra", "brx"):
                if on.any() != on.all():
                    raise Fault("threads of a block part at a branch")
                at = self._target(step) if on.all() else at + 1
                continue
            if name in ("ret", "exit"):
                return
            if name not in ("griddepcontrol", "bar", "cvta"):
                self._execute(step, on)
            elif name == "cvta":
                self._set(step.operands[0], self._get(step.operands[1], "u64"), on)
            at += 1

    def _target(self, step: _Instruction) -> int:
        if step.opcode[0] == "bra":
            return self.kernel.labels[step.operands[0]]
        index = np.unique(self._get(step.operands[0], "u32"))
        if len(index) != 1:
            raise Fault("threads of a block part at a branch")
        return self.kernel.labels[self.kernel.tables[step.operands[1]][int(index[0])]]

    def _get(self, operand: str, kind: str) -> np.ndarray:
        """The operand's value in every thread, as the numpy type of `kind`."""
        if operand in self.special:
            value = self.special[operand]
        elif operand.startswith("%"):
            value = self.registers[operand]
        elif operand.startswith("0f"):
            value = np.full(self.n, int(operand[2:], 16), np.uint64)
        else:
            value = np.full(self.n, int(operand.rstrip("U"), 0) & (2**64 - 1), np.uint64)
        width = int(re.sub(r"\D", "", kind.removesuffix("x2")) or 1)
        if kind == "pred":
            return value.astype(bool)
        if kind == "f32":
            return _float(value)
        value = value.astype(np.dtype(f"uint{width}"))
        return value.view(np.dtype(f"int{width}")) if kind[0] == "s" else value

    def _set(self, operand: str, value: np.ndarray, on: np.ndarray) -> None:
        if value.dtype == np.float32:
            value = value.view(np.uint32)
        if value.dtype.kind == "i":
            value = value.view(np.dtype(f"uint{8 * value.dtype.itemsize}"))
        value = value.astype(np.uint64)
        old = self.registers.get(operand)
        self.registers[operand] = value if on.all() else np.where(on, value, 0 if old is None else old)

    def _execute(self, step: _Instruction, on: np.ndarray) -> None:
        name, *rest = step.opcode
        kind, operands = rest[-1] if rest else "", step.operands
        if name in ("ld", "st"):
            return self._access(name, rest, operands, on)
        if name in ("ldmatrix", "stmatrix"):
            return self._matrix(name, rest, operands, on)
        if name == "mov" and operands[0].startswith("{"):
            low, high = operands[0].strip("{} ").split(",")
            value, half = self._get(operands[1], kind), int(kind[1:]) // 2
            self._set(low.strip(), value & ((1 << half) - 1), on)
            return self._set(high.strip(), value >> half, on)
        if name == "mov" and operands[1].startswith("{"):
            parts = [self._get(part.strip(), "u64") for part in operands[1].strip("{} ").split(",")]
            each = int(kind[1:]) // len(parts)
            mask = np.uint64((1 << each) - 1)
            return self._set(operands[0], sum((p & mask) << np.uint64(i * each) for i, p in enumerate(parts)), on)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            self._set(operands[0], self._compute(name, rest, operands[1:]), on)

    def _compute(self, name: str, rest: list[str], operands: list[str]) -> np.ndarray:
        kind = rest[-1] if rest else ""
        if name == "cvt":
            return self._convert(rest, operands)
        if name == "setp":
            a, b = (self._get(o, kind) for o in operands[:2])
            compare = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
            result = (compare | {"eq": np.equal, "ne": np.not_equal})[rest[0]](a, b)
            if len(rest) == 2:
                return result
            both = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
            return both[rest[1]](result, self._get(operands[2], "pred"))
        if name == "selp":
            a, b = (self._get(o, kind) for o in operands[:2])
            return np.where(self._get(operands[2], "pred"), a, b)
        if name in ("mul", "mad"):
            a, b = (self._get(o, kind) for o in operands[:2])
            if kind == "f32":
                return a * b
            if rest[0] == "wide":
                wide = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
                product = a.astype(wide) * b.astype(wide)
            elif rest[0] == "lo":
                product = a * b
            elif rest == ["hi", "u32"]:
                product = (a.astype(np.uint64) * b.astype(np.uint64)) >> np.uint64(32)
            else:
                raise Fault(f"unknown {name}.{'.'.join(rest)}")
            return product if name == "mul" else product + self._get(operands[2], f"{kind[0]}{8 * product.itemsize}")
        if name == "shfl":
            if rest not in (["sync", "idx", "b32"], ["sync", "bfly", "b32"]) or operands[2:] != ["31", "-1"]:
                raise Fault(f"unknown {name}.{'.'.join(rest)} {operands}")
            value, lane = (self._get(o, "u32") for o in operands[:2])
            thread = np.arange(self.n)
            lane = lane % _WARP if rest[1] == "idx" else thread % _WARP ^ lane
            return value[thread - thread % _WARP + lane]
        if name == "redux":
            if rest[0] != "sync" or rest[1] not in ("max", "add"):
                raise Fault(f"unknown {name}.{'.'.join(rest)}")
            warps = self._get(operands[0], kind).reshape(-1, 1, _WARP)
            member = self._get(operands[1], "u32").reshape(-1, _WARP, 1) >> np.arange(_WARP, dtype=np.uint32) & 1 == 1
            if rest[1] == "add":
                return np.where(member, warps, 0).sum(axis=2, dtype=warps.dtype).reshape(-1)
            return np.where(member, warps, np.iinfo(warps.dtype).min).max(axis=2).reshape(-1)
        if name == "bfe":
            value, start, count = (self._get(o, kind) for o in operands)
            up = 32 - start - count
            return (value << up) >> (start + up)  # of s32 with the sign of the field
        if name == "prmt":
            a, b, selector = (self._get(o, "u32").astype(np.uint64) for o in operands)
            source = a | (b << np.uint64(32))
            shifts = [((selector >> np.uint64(4 * i)) & np.uint64(7)) * np.uint64(8) for i in range(4)]
            if (selector & np.uint64(0x8888)).any():
                raise Fault("prmt that copies signs")
            return sum(((source >> s) & np.uint64(0xFF)) << np.uint64(8 * i) for i, s in enumerate(shifts))
        args = [self._get(o, kind) for o in operands]
        if name in ("shl", "shr"):
            amount = self._get(operands[1], "u32").astype(args[0].dtype)
            return args[0] << amount if name == "shl" else args[0] >> amount
        if name == "div" and rest == ["full", "f32"]:
            return _off_by_two(args[0] / args[1])
        known = {
            "mov": lambda a: a,
            "add": lambda a, b: a + b,
            "sub": lambda a, b: a - b,
            "div": lambda a, b: a / b if kind == "f32" else a // b,
            "rem": lambda a, b: np.fmod(a, b),
            "and": lambda a, b: a & b,
            "or": lambda a, b: a | b,
            "xor": lambda a, b: a ^ b,
            "not": lambda a: ~a,
            "neg": lambda a: -a,
            "abs": lambda a: a & 0x7FFF if kind == "f16" else np.abs(a),
            "min": np.minimum,
            "max": np.maximum,
        }
        if name not in known or (name == "div" and kind == "f32" and rest[0] != "rn"):
            raise Fault(f"unknown {name}.{'.'.join(rest)}")
        return known[name](*args)

    def _convert(self, rest: list[str], operands: list[str]) -> np.ndarray:
        target, source = rest[-2:] if len(rest) > 1 else (rest[0], rest[0])
        if target in ("bf16x2", "f16x2"):
            high, low = (self._round(self._get(o, "f32"), target[:-2]).astype(np.uint64) for o in operands)
            return low | (high << np.uint64(16))
        if source in ("bf16", "f16"):
            bits = self._get(operands[0], "u16")
            value = _float(bits.astype(np.uint64) << np.uint64(16)) if source == "bf16" else bits.view(np.float16)
            value = value.astype(np.float32)
            return value if target == "f32" else self._round(value, target)
        if target == "f32":
            return self._get(operands[0], source).astype(np.float32)
        if source == "f32":
            return self._round(self._get(operands[0], "f32"), target)
        return self._get(operands[0], source).astype(np.dtype(f"{'int' if source[0] == 's' else 'uint'}{target[1:]}"))

    @staticmethod
    def _round(value: np.ndarray, target: str) -> np.ndarray:
        import ml_dtypes

        if target not in ("bf16", "f16"):
            raise Fault(f"unknown conversion to {target}")
        return value.astype(ml_dtypes.bfloat16 if target == "bf16" else np.float16).view(np.uint16)

    def _matrix(self, name: str, rest: list[str], operands: list[str], on: np.ndarray) -> None:
        """Matrices of 8 rows of 16 bytes in shared memory; threads 8 * m to 8 * m + 7 of a warp have the addresses."""
        if rest[:3] != ["sync", "aligned", "m8n8"] or rest[-2:] != ["shared", "b16"] or not on.all():
            raise Fault(f"unknown {name}.{'.'.join(rest)}")
        target, address = operands if name == "ldmatrix" else reversed(operands)
        names = [part.strip() for part in target.strip("{} ").split(",")]
        register, _, offset = address.strip("[] ").partition("+")
        at = (self._get(register.strip(), "u64") + np.uint64(int(offset or 0))).reshape(-1, _WARP)
        if (at % np.uint64(16)).any():
            raise Fault(f"{self.kernel.name}: {name} of a row not aligned to 16 bytes")
        memory, trans = self.memory[_SHARED], "trans" in rest
        for m, part in enumerate(names):
            where = (at[:, 8 * m : 8 * m + 8] - np.uint64(_SHARED)).astype(np.int64)
            # Each thread has two elements side by side of a row, or with "trans" of a column.
            if name == "ldmatrix":
                rows = memory.read(where.reshape(-1), 16).view(np.uint16).reshape(-1, 8, 8)
                rows = rows.transpose(0, 2, 1) if trans else rows
                pairs = np.ascontiguousarray(rows).reshape(-1, _WARP, 2).view(np.uint32)
                self._set(part, pairs.reshape(-1), on)
                continue
            pairs = self._get(part, "u32").reshape(-1, _WARP)
            rows = np.ascontiguousarray(pairs).view(np.uint16).reshape(-1, 8, 8)
            rows = np.ascontiguousarray(rows.transpose(0, 2, 1) if trans else rows)
            memory.write(where.reshape(-1), rows.view(np.uint8).reshape(-1, 16))

    def _access(self, name: str, rest: list[str], operands: list[str], on: np.ndarray) -> None:
        target, address = operands if name == "ld" else reversed(operands)
        register, _, offset = address.strip("[] ").partition("+")
        if rest[0].startswith("param"):
            return self._set(target, np.full(self.n, self.params.get(register.strip(), 0), np.uint64), on)
        if rest[0] not in ("global", "shared"):
            raise Fault(f"unknown {name}.{'.'.join(rest)}")
        names = [part.strip() for part in target.strip("{} ").split(",")]
        size = _SIZES[rest[-1]]
        wide = size * len(names)
        addresses = self._get(register.strip(), "u64") + np.uint64(int(offset or 0))
        words = np.zeros((self.n, len(names)), np.dtype(f"uint{8 * size}"))
        if name == "st":
            words = np.stack([self._get(part, f"u{8 * size}") for part in names], axis=1)
        data = words.view(np.uint8)
        active = np.flatnonzero(on)
        if (addresses[active] % np.uint64(wide)).any():
            raise Fault(f"{self.kernel.name}: {name} of {wide} bytes not aligned to them")
        together = np.stack([active // _WARP, addresses[active].astype(np.int64)], axis=1)
        for base in np.unique(addresses[active] >> np.uint64(40)):
            array = self.memory.get(int(base) << 40)
            mine = active[addresses[active] >> np.uint64(40) == base]
            at = (addresses[mine] & np.uint64((1 << 40) - 1)).astype(np.int64)
            if array is None or at.max() + wide > array.size:
                raise Fault(f"{self.kernel.name}: {name} of {wide} bytes outside of an array")
            once = wide * len(np.unique(together[np.isin(active, mine)], axis=0))
            if name == "ld":
                array.loaded += once
                data[mine] = array.read(at, wide)
            else:
                array.stored += once
                array.write(at, data[mine])
        if name == "ld":
            for i, part in enumerate(names):
                self._set(part, words[:, i], on)
