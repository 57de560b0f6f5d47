"""Where a pool lives: the ranks of a mesh, and how a function runs on each of them."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import dispatch


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def _only(spec: P, axes: set[str]) -> P:
    """`spec` without the axes that are not among `axes`."""
    parts = [(part,) if isinstance(part, str) else part or () for part in spec]
    return P(*(tuple(name for name in names if name in axes) or None for names in parts))


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The mesh axes that a pool is split over.

    The mesh is kept without its devices: programs follow their arguments' devices, and a pool exported here equals one
    that lives there.
    """

    mesh: AbstractMesh | None = None
    dcp_axis: tuple[str, ...] = ()
    tp_axis: str | None = None

    def _size(self, axis: str) -> int:
        return 1 if self.mesh is None else self.mesh.shape[axis]

    @classmethod
    def create(cls, mesh, dcp_axis, tp_axis, where: str) -> "Ranks":
        """Of a Mesh or AbstractMesh (or None), a DCP axis name (or names) and a TP axis name.

        Raises:
          ValueError: an axis without a mesh, or one that the mesh lacks or that is named twice.
        """
        if not isinstance(mesh, Mesh | AbstractMesh | None):
            raise ValueError(f"{where}: mesh must be a jax Mesh, an AbstractMesh or None, got {mesh!r}")
        dcp = (dcp_axis,) if not isinstance(dcp_axis, tuple | list | None) else tuple(dcp_axis or ())
        axes = dcp if tp_axis is None else (*dcp, tp_axis)
        if mesh is None:
            if axes:
                raise ValueError(f"{where}: dcp_axis {dcp_axis!r} and tp_axis {tp_axis!r} need a mesh")
            return cls()
        for name in axes:
            if name not in mesh.axis_names or axes.count(name) > 1:
                raise ValueError(f"{where}: axes {axes} must be distinct axes of the mesh, which has {mesh.axis_names}")
        return cls(AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types), dcp, tp_axis)

    @property
    def dcp_size(self) -> int:
        """Ranks that share the tokens of a sequence."""
        return math.prod(map(self._size, self.dcp_axis))

    @property
    def tp_size(self) -> int:
        """Ranks that share the heads."""
        return 1 if self.tp_axis is None else self._size(self.tp_axis)

    @property
    def dcp(self) -> tuple[str, ...] | None:
        """The DCP axes as an entry of a PartitionSpec."""
        return self.dcp_axis or None

    def _manual_axes(self) -> set[str]:
        return set(jax.sharding.get_abstract_mesh().manual_axes)

    @property
    def axes(self) -> set[str]:
        """All axes that the pool is split over."""
        return {*self.dcp_axis, *filter(None, [self.tp_axis])}

    @property
    def explicit(self) -> bool:
        """Whether JAX tracks how arrays lie on the mesh."""
        return self.mesh is not None and AxisType.Explicit in self.mesh.axis_types

    def axes_not_manual(self) -> set[str]:
        """The pool's axes that no shard_map around the caller has opened."""
        return self.axes - self._manual_axes()

    def misopened(self) -> str | None:
        """What is wrong with the shard_map that the caller stands in, or None.

        A rank's number counts along all DCP axes, the first the slowest: with some of them opened, the parts that an
        inner shard_map makes of the rest are those of the pool only where the opened ones come first.
        """
        manual = self._manual_axes()
        opened = [name in manual for name in self.dcp_axis if self._size(name) > 1]
        if sorted(opened, reverse=True) == opened:
            return None
        return f"a shard_map over some of dcp_axis {self.dcp_axis} must open the first of them, not only later ones"

    def split_here(self) -> tuple[int, int]:
        """Into how many parts rows and heads are split already where the caller stands: (1, 1) outside a shard_map."""
        rows = heads = 1
        for name in self._manual_axes():
            if name in self.dcp_axis:
                rows *= self._size(name)
            elif name == self.tp_axis:
                heads = self._size(name)
        return rows, heads

    def reshard(self, arrays, specs, like=()):
        """On an Explicit mesh, `arrays` laid out by `specs` (a prefix tree), on `like`'s mesh; else as they are."""
        if not self.explicit:
            return arrays
        mesh = self._mesh_of((arrays, like))

        explicit = {n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Explicit}
        if not explicit:  # in a shard_map over all of them
            return arrays

        def move(spec, tree):
            sharding = NamedSharding(mesh, _only(spec, explicit))
            return jax.tree.map(lambda x: jax.sharding.reshard(x, sharding), tree)

        return jax.tree.map(move, specs, arrays, is_leaf=_is_spec)

    def _mesh_of(self, arrays):
        """The mesh to trace with: the one in force, that of explicitly sharded `arrays`, or our own.

        They are alike but for the devices' kind; JAX wants the very one.
        """
        context = jax.sharding.get_abstract_mesh()
        if not context.empty:
            return context
        meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays)]
        return next((mesh for mesh in meshes if not mesh.empty), self.mesh)

    def map(self, fn: Callable, in_specs, out_specs) -> Callable:
        """`fn(rank, *args)` on every rank's part of the arguments, `rank` being the DCP rank.

        Opens a shard_map over whatever axes of the mesh the caller has not opened already.
        """
        if self.mesh is None:
            return lambda *args: fn(0, *args)

        def local(*args):
            return fn(jax.lax.axis_index(self.dcp_axis) if self.dcp_axis else 0, *args)

        manual = self._manual_axes()
        if manual and not self.axes_not_manual():
            return local
        opened = self.axes_not_manual() if manual else set(self.mesh.axis_names)

        in_specs, out_specs = jax.tree.map(lambda s: _only(s, opened), (in_specs, out_specs), is_leaf=_is_spec)

        def mapped(*args):
            # Within a shard_map that checks what varies over its axes, the inner one must say so of its results too.
            options = {"in_specs": in_specs, "out_specs": out_specs, "axis_names": opened}
            options["check_vma"] = bool(dispatch.varying_axes(args) & manual)
            return jax.shard_map(local, mesh=self._mesh_of(args), **options)(*self.reshard(args, in_specs))

        return mapped
