# ruff: noqa: E501  (a table: one row, one line)
"""The support matrix: one list that the tests run and the documentation is generated from.

A row says what a user's model or script does, what then happens, and why. ``check`` is the proof. The verdicts:

* works: measured and preconditioned, as the reference says;
* momentum: trains, and the parameters named move without a block, by AdamW or their momentum, as the optimizer's table
  says;
* refused: an error or a warning says what was found, why it can't work, and what to write instead;
* unseen: trains, and learns from a part without a word, for nothing tells; the row says what to write instead.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tests.real import calls, drop_in, loops, memory, models, parameters, processes, state, trainers


@dataclass(frozen=True)
class Row:
    """A line of the matrix."""

    area: str
    name: str
    verdict: str
    why: str
    check: Callable[[], None]

    @property
    def id(self) -> str:
        return f"{self.area}-{self.name}".lower().replace(" ", "-").replace(",", "").replace("`", "")


def _rows(area: str, *rows: tuple[str, str, str, Callable[[], None]]) -> list[Row]:
    return [Row(area, *row) for row in rows]


W, M, R, U = "works", "momentum", "refused", "unseen"
ROWS: list[Row] = [
    *_rows(
        "models",
        ("in-place activations", W, "a tensor hook keeps the gradient of the layer's own output", models.in_place_activation),
        ("in-place sums", W, "`out += shortcut` after a layer, also `*=`", models.in_place_sum),
        ("in-place on views", W, "the hook sits on the view's base", models.in_place_on_a_view),
        ("in-place dropout", W, "the second pass draws the same mask", models.in_place_dropout),
        ("module used twice", W, "its calls are merged as one batch; A is looked at along the mean input of all of them", models.module_used_twice),
        ("weights used again by F.linear", U, "the layer's own calls are measured, and the gradient is a sum: autograd does not tell another product from a penalty. Call the layer itself, whose calls are merged, or leave its weight to another optimizer", calls.weight_used_again),
        ("penalties on weights", W, "in the gradient, and not in the curvature, as any weight decay", calls.penalties_on_weights),
        ("hooks that change outputs", W, "before or after `extend`, prepended or not: the layer's own output is watched before they run", calls.hooks_that_change_outputs),
        ("hooks that change inputs or gradients", W, "what the layer multiplied, and the gradient that entered it", calls.hooks_that_change_inputs_or_gradients),
        ("global forward hooks", M, "they run before all others: a warning names each layer; register hooks on modules", calls.global_forward_hooks),
        ("settings that change between calls", M, "one convolution at several dilations: a warning names the layer", calls.settings_that_change_between_calls),
        ("functional_call with other weights", M, "weight noise, MAML: the gradient is not the layer's own; a warning names each layer. With the model's own parameters it works", calls.functional_call_with_other_weights),
        ("tied weights", M, "the gradient is a sum over several layers, no layer's own", models.tied_weights),
        ("head tied to an embedding", M, "as tied weights; the other layers are preconditioned", models.embedding_tied_to_the_head),
        ("unused layers", W, "no gradient: neither moved nor decayed; curvature starts when they are used", models.unused_layer),
        ("frozen weight", M, "nothing is measured; a trainable bias beside it moves without a block, with a warning", models.frozen_weight),
        ("frozen bias", W, "the bias stays a coordinate of the block and does not move", models.frozen_bias),
        ("frozen first layer", W, "the layers behind it are measured", models.frozen_first_layer),
        ("subclasses", W, "a subclass that does not override `forward` computes h = W a", models.subclass),
        ("subclasses with their own forward", M, "it may not compute h = W a; `kfqn_ext.geometry.register` teaches it", models.subclass_with_its_own_forward),
        ("own layers", W, "`kfqn_ext.geometry.register(Kind, build)`", models.own_layer),
        ("parametrized layers", M, "weight, spectral norm and others: the weight that is trained is not the one that multiplies", models.parametrized),
        ("old weight_norm and spectral_norm", M, "as parametrized layers", models.old_weight_norm),
        ("lazy layers", R, "no shape yet: run one forward pass, then build the optimizer; `extend` may come before", models.lazy_layers),
        ("MultiheadAttention", M, "its projections are weights that no layer is called with", models.multihead_attention),
        ("TransformerEncoderLayer", W, "linear1 and linear2; attention and norms have no block. With `batch_first=True`: dimension 0 is data", models.transformer_layer),
        ("norms and embeddings", M, "not of the form h = W a: moved by AdamW, in the paper's form by their momentum; the layers around them are preconditioned", models.norms_and_embeddings),
        ("BatchNorm", W, "running statistics count a minibatch once; before it ∂h̄ = 0, and H_G stays I/λ_G", models.batch_norm),
        ("transposed convolutions", M, "not of a registered kind", models.transposed_convolution),
        ("unbatched inputs", W, "one datum; a 2-d input of a linear layer is a batch", models.unbatched_input),
        ("keyword inputs", W, "`layer(input=x)`", models.keyword_input),
        ("modules that return dictionaries", W, "only layers are hooked", models.dict_output),
        ("cat, views, weighted sums", W, "nothing is propagated through the network", models.functional_forward),
        ("squeezed outputs", W, "data are along dimension 0 of the layer's input, whatever the loss sees", models.squeezed_output),
        ("sequences", W, "dimensions between the first and the last are locations", models.sequences),
        ("strides that leave pixels over", W, "the layer's own arithmetic", models.border_pixels_left_over),
        ("padding and locations", W, "λ_A = √|T|√λ with the true number of locations", models.true_number_of_locations),
        ("checkpointing, not reentrant", W, "the hook fires once", models.checkpointing(False)),
        ("checkpointing, reentrant", W, "also in the second pass", models.checkpointing(True)),
        ("a frozen layer in a checkpoint", W, "as much is saved whatever is measured: the forward pass may be outside of `with backpack(...)`", models.frozen_layer_in_a_checkpoint),
        ("extended by BackPACK", R, "its hooks take the place of ours: `kfqn_ext.unextend(model)` takes both off, then build the optimizer", models.extended_by_backpack),
        ("channels_last", W, "equal to the contiguous run", models.channels_last),
        ("float64", W, "state is float64", models.double_precision),
        ("bfloat16 parameters", W, "quantities and state are float32", models.low_precision_parameters),
        ("DataParallel", R, "copies of the layers live for one forward pass", models.data_parallel),
        ("DataParallel around a model in use", R, "the copy says so in the forward pass", models.replicas_of_data_parallel),
        ("no layer at all", R, "use a `torch.optim` optimizer, or register the kind", models.no_layer_at_all),
        ("several inputs", W, "`Minibatch`: a tuple or list is `model(*x)`, a mapping `model(**x)`, a single one of these `(x,)`", parameters.several_inputs),
        ("nested tensors", R, "their data differ in the number of locations: pad them. The model runs as before", parameters.nested_tensors),
        ("complex parameters", M, "moved as their real and imaginary parts", parameters.complex_parameters),
        *((f"torchvision {name}", W, "as its code is; see the table below", models.torchvision_family(name)) for name in models.SMALL),
    ),
    *_rows(
        "loops",
        ("gradient accumulation", W, "`first_pass(keep_inputs=True)`: equal to the big batch, curvature included", loops.accumulation("mean")),
        ("gradient accumulation of a sum", W, "as above with `reduction=\"sum\"`", loops.accumulation("sum")),
        ("gradient accumulation without keep_inputs", W, "no input is held; only the direction of the Hessian action is the first micro-batch's", loops.accumulation_without_kept_inputs),
        ("gradient accumulation of KFAC", W, "Ω and Γ equal the big batch's", loops.accumulation_of_kfac),
        ("second pass over other data", R, "a warning names the layer; nothing is learned", loops.a_second_pass_over_other_data),
        ("several losses", W, "several backward passes through one forward pass add up, with `as_printed`", loops.several_losses),
        ("several losses, factors", R, "Γ of a sum does not follow from its terms, and K-BFGS's damping counts in units of Γ: add the losses up", loops.several_losses_of_squares),
        ("retain_graph", W, "each pass is measured", loops.retained_graph),
        ("two forwards, evaluation between", W, "each backward pass finds its own call's input", loops.two_forwards_and_an_evaluation),
        ("auxiliary passes", W, "`autograd.grad(loss, x)` and `create_graph=True` are passed over", loops.auxiliary_passes),
        ("auxiliary pass in a closure", W, "in the second pass as well, whose weights are frozen: with `backpack.disable()` it costs less", loops.auxiliary_pass_in_a_closure),
        ("gradients that are returned", W, "`autograd.grad(loss, weights)` in a first pass, for GradNorm or a log, is no data", calls.gradients_that_are_returned),
        ("weights changed before the backward pass", M, "in place: a warning names the layer. What is written through `.data` nobody can see", calls.weights_changed_before_the_backward_pass),
        ("two models in two threads", W, "as alone, where they draw no random numbers: torch's generators are the process's", calls.two_models_in_two_threads),
        ("step without first_pass", R, "when curvature is due: a warning, and no older measurement is used", loops.measurements_are_used_once),
        ("step without anything", R, "the error shows both forms", loops.step_without_a_closure),
        ("backward(inputs=...)", W, "layers outside have no result, and reading one says why", loops.partial_backward),
        ("gradients at the same address", W, "recognized as new", loops.equal_memory_of_gradients),
        ("reduction sum", W, "say `reduction=\"sum\"`: a gradient carries no trace of it", loops.summed_loss),
        ("losses over sequences", W, "ignored targets, class weights, means over all entries: as autograd", loops.losses_over_sequences),
        ("last batch smaller", W, "means are per datum", loops.smaller_last_batch),
        ("loss of one's own", W, "only layers are extended", loops.unextended_loss_and_own_forward),
        ("autocast bfloat16", W, "quantities and state are float32", loops.autocast_bfloat16),
        ("products in reduced precision", W, "directions follow `set_float32_matmul_precision`; quantities and curvature are float32", loops.reduced_precision),
        ("GradScaler", W, "`first_pass(loss_scale=scaler.get_scale())`, `second_pass(loss_scale=...)`", loops.grad_scaler),
        ("float16 without its scale", R, "can't be seen in a gradient, so it must be said", loops.float16_needs_its_scale),
        ("GradScaler with a closure", R, "by torch: use the two phases", loops.scaler_with_a_closure),
        ("gradient clipping", W, "between the phases; the second pass is not disturbed", loops.clipping),
        ("learning-rate schedulers", W, "every kind that torch has", loops.schedulers),
        ("SWA, EMA, deepcopy of a model", W, "copies carry working hooks", loops.model_copies),
        ("parameter groups", W, "lr, damping, T, weight decay; weight and bias of a layer may be in two groups that differ in the decay alone", loops.groups),
        ("no decay of biases", W, "groups by `p.ndim` or by name, as trainers build them", parameters.decay_of_weights_alone),
        ("unfreezing", W, "`add_param_group`", loops.unfreezing),
        ("a head that is replaced", W, "`add_param_group`; the old one is left where it is", parameters.replaced_head),
        ("set_to_none", W, "both ways", loops.set_to_none),
        ("closure or phases", W, "bit for bit the same", loops.closure_and_phases_agree),
        ("torch.compile after", W, "graph breaks at the layers; build the optimizer first", loops.compiled_after),
        ("torch.compile before", R, "compiled code runs no new hooks: a warning names each layer, which moves without a block", loops.compiled_before),
        ("torch.export, tracing, quantize_dynamic", W, "what is written down has no hooks; copies may keep them", loops.written_down),
        ("one graph, torch.jit.script", R, "`fullgraph=True` leaves no place for hooks where gradients are on: call `kfqn_ext.unextend(model)` first", loops.one_graph),
        ("torch.func and Hessian-vector products", W, "on an extended model", loops.functional_transforms),
        ("no waiting for the device", W, "between curvature updates no number is read", loops.ordinary_step_never_waits),
    ),
    *_rows(
        "state",
        ("save, load, resume", W, "every optimizer, bit for bit", state.every_optimizer_resumes),
        ("bfloat16 parameters", W, "H stays float32", state.bfloat16_parameters),
        ("parameters in another order", W, "found by their names, where these were saved", parameters.another_order),
        ("hooks of loading", W, "torch's; names that differ are refused, and a hook can rename them", parameters.loading_hooks),
        ("load_state_dict(assign=True) of the model", R, "the optimizer still has the old parameters: load before it is built", parameters.assigned_parameters),
        ("loading twice", W, "loaded state is a copy", state.loaded_twice),
        ("schedulers built before or after", W, "rates are read from the groups at each step", state.around_schedulers),
        ("older layouts", R, "by version", state.older_layout),
        ("state of another optimizer or model", R, "before anything changes", state.other_optimizer_or_model),
        ("safe loading", W, "`weights_only=True`", state.nothing_but_tensors),
        ("a dead layer after resuming", W, "not moved", state.dead_layer_after_resuming),
        ("distributed checkpoints", W, "the flat form, `StateDictOptions(flatten_optimizer_state_dict=True)`; the nested form needs `strict=False`", state.distributed_checkpoint),
        ("pickle and deepcopy of an optimizer", R, "it belongs to its model: copy the two state_dicts", state.pickle_and_deepcopy),
        ("between devices", W, "state goes to where the parameters are", state.moving_a_model),
    ),
    *_rows(
        "memory",
        ("forward without backward", W, "nothing is held", memory.forward_without_backward),
        ("no_grad and inference_mode", W, "nothing is held", memory.without_gradients),
        ("after backward", W, "with a probe, inputs are let go", memory.after_a_backward_pass),
        ("during backward", W, "an input is let go as autograd lets it go: no more memory than without", memory.during_a_backward_pass),
        ("backward that stops at an output", W, "does not enter the layer: its input stays for the pass that does", memory.stopped_at_an_output),
        ("a second pass through a frozen layer", R, "the first has let the input go; `retain_graph=True` keeps it", memory.gone_with_the_graph),
        ("exception in an extension", W, "hooks, context and modules as before", memory.exception_in_an_extension),
        ("exception in a closure", W, "parameters, buffers and context as before", memory.exception_in_a_closure),
        ("between steps", W, "nothing of the minibatch is alive", memory.between_steps),
        ("1000 models", W, "no hook and no tensor stays", memory.a_thousand_models),
        ("200 steps", W, "constant memory", memory.two_hundred_steps),
        ("deleting", W, "frees optimizer, state and model", memory.deleted_optimizer),
        ("gradients", W, "of the step before are not held", memory.no_copy_of_the_gradients),
    ),
    *_rows(
        "processes",
        ("DistributedDataParallel", W, "`KBFGS(DistributedDataParallel(model))`: the steps of one process with all data, and its state; see [processes.md](processes.md). Quantities are local, to be averaged by `num_data`", processes.two_processes),
        ("a module that holds the wrapper", W, "`KBFGS(nn.Sequential(wrapper))`: the wrapper is found", processes.cases("what is given: holder")),
        ("`process_group` and the inner module", W, "`KBFGS(model, process_group=torch.distributed.group.WORLD)`, where the wrapper is a trainer's", processes.cases("what is given: group", "micro batches of the inner module")),
        ("a model of its own in each process", W, "`process_group=torch.distributed.new_group([rank], use_local_synchronization=True)`", processes.cases("every row", "fsdp over one process")),
        ("find_unused_parameters", W, "also for a layer that the data of some ranks do not reach", processes.cases("options of the wrapper: find_unused_parameters", "a layer that one rank does not use")),
        ("static_graph", W, "the second pass does not disturb it", processes.cases("options of the wrapper: static_graph")),
        ("gradient_as_bucket_view", W, "as without", processes.cases("options of the wrapper: gradient_as_bucket_view")),
        ("no_sync and micro-batches", W, "in `first_pass(keep_inputs=True)`, around all micro-batches but the last", processes.cases("micro batches under no sync")),
        ("no_sync around a whole step", R, "\"The ranks have different gradients\", on all ranks, before anything moves: leave the last micro-batch outside", processes.cases("a whole step under no sync", "gradients that differ after loading")),
        ("no wrapper around the model", R, "the same error, where `process_group` says that ranks train together; where nothing says it, an error with both ways out", processes.cases("gradients that differ", "nobody says who trains together")),
        ("unequal shares", W, "with the losses scaled by N_r R / N the mean over all data; with plain means the mean of the ranks' means, as the wrapper has it", processes.cases("unequal shares with scaled losses", "unequal shares whose losses are means")),
        ("a loss that is a sum", W, "`reduction=\"sum\"`; the wrapper divides by the number of ranks, so that the rate is to be multiplied with it", processes.cases("a sum over data")),
        ("a rank without data", W, "its loss is zero, and counts as that; no data on any rank is an error on all", processes.cases("a rank without data", "no rank has data", "fsdp rank without data")),
        ("a batch that is not finite on one rank", W, "all skip it, with a GradScaler too", processes.cases("a batch that is not finite", "a scaler that skips", "fsdp batch that is not finite")),
        ("`DistributedDataParallel.join`", R, "\"a rank that has run out of data only answers the wrapper's own messages\": give as many batches to all, or an empty one with a loss of zero", processes.cases("join")),
        ("BatchNorm, buffers", W, "sent by the first pass of a step alone", processes.cases("buffers stay as those of one pass")),
        ("BatchNorm over all ranks", W, "layers before it are spared as in one process; torch's SyncBatchNorm takes no tensors of a CPU and was not run", processes.cases("batch normalization over ranks")),
        ("random numbers", W, "sampled targets differ by rank; for dropout seed by rank, after the model is built. Copies stay equal to the last bit", processes.cases("sampled targets differ by rank", "copies are equal to the last bit")),
        ("warm_start", W, "with loaders of other lengths", processes.cases("warm start", "sharded warm start", "fsdp warm start", "fsdp warm start from unequal loaders")),
        ("`shard_state=True`", W, "each layer's state on one rank; the steps of one process", processes.cases("sharded", "state of a rank", "steps and directions are sent once")),
        ("`shard_state=True` and no_sync", W, "as copies", processes.cases("sharded micro batches under no sync")),
        ("`shard_state=True` of OnePassKBFGS", W, "owners choose the directions for Γ at the step", processes.cases("sharded loop of any optimizer", "sharded")),
        ("a rule of one's own for Γ, divided state", R, "\"it does not say how many\" directions it chooses: give it the property `num_directions`", processes.cases("rules that do not say how many directions they choose")),
        ("KFAC's inversions", W, "copies divide them, and the first ones of every optimizer", processes.cases("each matrix is inverted once")),
        ("FSDP2", W, "`fully_shard(model)`, then `KBFGS(model)`: as above, with each layer's state on one process. Quantities are found by their layer, `ext[module]`, for `module.weight` is another object after the pass", processes.two_processes_that_share_a_model),
        ("FSDP2, whole model, by blocks, by layers", W, "any choice of units; in the loop of any optimizer too", processes.cases("fsdp steps", "quantities", "fsdp loop of any optimizer")),
        ("FSDP2, `reshard_after_forward`", W, "on or off", processes.cases("quantities")),
        ("FSDP2, mixed precision policy", W, "h̄ = W ā is of W as it is kept", processes.cases("fsdp passes in half precision")),
        ("FSDP2, `set_requires_gradient_sync`", W, "as no_sync", processes.cases("fsdp micro batches")),
        ("FSDP2, checkpointed activations", W, "not reentrant, around units", processes.cases("fsdp checkpointed activations")),
        ("FSDP2, uneven and empty shards", W, "7, 5 and 3 rows on two and four processes", processes.cases("rows of divided tensors", "fsdp checkpoints")),
        ("an optimizer built before `fully_shard`", R, "\"fully_shard was called after\", in the first step: build it afterwards", processes.cases("fsdp optimizer that was built before")),
        ("FSDP1", R, "`FullyShardedDataParallel` leaves layers no weight of their own: use `fully_shard`. (Its constructor asks for a GPU: the refusal was tried on its class.)", processes.fsdp1),
        ("tensor parallelism", R, "\"no process sees all of a layer's input or output\", by the optimizer and by the extensions", processes.cases("fsdp other ways to divide")),
        ("a mesh of two dimensions", R, "\"a mesh of 2 dimensions\": use one dimension. `shard_placement_fn` and several meshes are refused too", processes.cases("fsdp other ways to divide")),
        ("CPU offload", R, "\"CPU offload is not supported\", where rows lie on another device than that of the passes. (Tried with a model on the device meta.)", processes.cases("fsdp other ways to divide")),
        ("parameters outside of all units", R, "\"outside of all units\": call `fully_shard` on the whole model, or freeze them", processes.cases("fsdp other ways to divide", "fsdp gradient that nobody averages")),
        ("ZeroRedundancyOptimizer", R, "\"the model comes first\": it gives parameters without their layers. `KBFGS(model, shard_state=True)` divides the state", processes.cases("zero redundancy optimizer")),
        ("torch.distributed.checkpoint", W, "flat form; from one process, copies, `shard_state=True` or FSDP2 to each other, on other numbers of processes", processes.cases("parts through dcp", "between other numbers of ranks through dcp", "fsdp checkpoints")),
        ("`state_dict` of copies", W, "all ranks hold the same: one process loads it", processes.cases("saved by several and loaded by one")),
        ("`gather_state`", W, "the whole state on one rank; it loads anywhere", processes.cases("the whole state on one rank", "fsdp whole state on one rank")),
        ("a rank's part of the state", R, "where it lacks what is to be kept, an error names the layers and both ways to save", processes.cases("a part is refused")),
        ("a layer that wakes up after resuming", W, "`DefaultLoadPlanner(allow_partial_load=True)`, for it has no state yet", processes.cases("a layer that wakes up after resuming")),
        ("Accelerate, two processes", W, "`accelerator.prepare(model)`, then `KBFGS(model)`; accumulation and clipping too", processes.trainers("accelerate, the example", "accelerate, drop-in")),
        ("Lightning, two processes", W, "`KBFGS(self.net, process_group=...)` in `configure_optimizers`; manual and automatic, accumulation and clipping too", processes.trainers("lightning, the example", "lightning, automatic", "lightning, drop-in")),
    ),
    *_rows(
        "trainers",
        ("plain loop", W, "`examples/loops/plain.py`", trainers.plain),
        ("Accelerate", W, "`examples/loops/accelerate_loop.py`", trainers.accelerate),
        ("Lightning", W, "manual optimization, `examples/loops/lightning_loop.py`", trainers.lightning),
        ("Lightning, automatic", W, "its closure repeats the batch; hooks and logs of the training step run twice when curvature is due", trainers.lightning_automatic),
        ("drop-in, plain loop", W, "`OnePassKBFGS` needs nothing but `step()`: `examples/loops/drop_in.py`", drop_in.plain),
        ("drop-in, Accelerate", W, "with accumulation and clipping, equal to a loop by hand", drop_in.accelerate),
        ("drop-in, Lightning", W, "automatic optimization, as above", drop_in.lightning),
        ("drop-in, Hugging Face", W, "`Trainer(..., optimizers=(OnePassKBFGS(model), None))`, as above", drop_in.hugging_face),
        ("phases of a trainer's wrapper", R, "what they measure would be lost: call those of `optimizer.optimizer`", trainers.phases_of_a_wrapper),
        ("a closure after first_pass", R, "one form or the other; the empty closure of a trainer is fine", trainers.both_forms_at_once),
    ),
]  # fmt: skip
