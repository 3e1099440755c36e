"""Is a model divided among processes, how, and can its layers be measured then? Found out before anything moves."""

from typing import Any

from torch import distributed, nn

from kfqn_ext._torch import is_divided, rest, units_of_fsdp2
from kfqn_ext.errors import UnsupportedLayerError, listed

_WAYS = "Use DistributedDataParallel, or fully_shard over all processes on a mesh of one dimension."


def group_of(model: nn.Module) -> distributed.ProcessGroup | None:
    """The processes that FSDP2 has divided a model among; None where it has not.

    Raises:
        UnsupportedLayerError: If the model is divided in another way.
    """
    _refuse_fsdp1(model)
    rest(model)
    divided: dict[str, Any] = {name: p for name, p in model.named_parameters() if is_divided(p)}
    if not divided:
        return None
    if not units_of_fsdp2(model):
        raise UnsupportedLayerError(
            f"{listed(list(divided))}: divided among processes by tensor parallelism, so that no process sees all of a "
            f"layer's input or output. {_WAYS}"
        )
    _check_meshes(divided)
    _check_parts(model, divided)
    group: distributed.ProcessGroup = next(iter(divided.values())).device_mesh.get_group()
    return group


def _refuse_fsdp1(model: nn.Module) -> None:
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if "FullyShardedDataParallel" in kinds:
        raise UnsupportedLayerError(
            "FullyShardedDataParallel keeps the weights of several layers in one flat parameter, so that a layer has "
            "none of its own. Use torch.distributed.fsdp.fully_shard(model), and build the optimizer on that."
        )


def _check_meshes(divided: dict[str, Any]) -> None:
    more = [name for name, p in divided.items() if p.device_mesh.ndim > 1]
    if more:
        raise UnsupportedLayerError(
            f"{listed(more)}: divided over a mesh of {divided[more[0]].device_mesh.ndim} dimensions, as with copies of "
            f"shards or with tensor parallelism. {_WAYS}"
        )
    others = [name for name, p in divided.items() if not (p.placements[0].is_shard(0))]
    if others:
        raise UnsupportedLayerError(
            f"{listed(others)}: divided as {divided[others[0]].placements[0]}, and not by rows. Leave "
            "shard_placement_fn of fully_shard out."
        )
    meshes = {p.device_mesh for p in divided.values()}
    if len(meshes) > 1:
        raise UnsupportedLayerError(
            f"The model is divided over {len(meshes)} meshes: give all calls of fully_shard the same mesh."
        )
    elsewhere = [name for name, p in divided.items() if p.device.type != p.device_mesh.device_type]
    if elsewhere:
        found = divided[elsewhere[0]]
        raise UnsupportedLayerError(
            f"{listed(elsewhere)}: on device {found.device.type}, and passes run on {found.device_mesh.device_type}. "
            "CPU offload is not supported: leave offload_policy out. A model on the device meta gets its memory "
            "before the optimizer is built."
        )


def _check_parts(model: nn.Module, divided: dict[str, Any]) -> None:
    whole = [name for name, p in model.named_parameters() if name not in divided and p.requires_grad]
    if whole:
        raise UnsupportedLayerError(
            f"{listed(whole)}: outside of all units of fully_shard, so that nobody averages their gradients over "
            "processes. Call fully_shard(model) on the whole model, without ignored_params, or freeze them."
        )
    complexes = [name for name, p in divided.items() if p.is_complex()]
    if complexes:
        raise UnsupportedLayerError(
            f"{listed(complexes)}: complex, and fully_shard has divided it. Write it as real and imaginary parts."
        )
