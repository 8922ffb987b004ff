"""Why each patch is there: the headers of the diffs, by their numbers."""

from __future__ import annotations

from megatron_stability.megatron.patching.anchor.anchors import Header

HEADERS = {
    1: Header(
        "001-seam-module",
        "one module through which Megatron finds the plugin",
        "the calls opened by the other patches need the plugin if it is there and nothing if it is not; no "
        "plugin, stock Megatron",
        "none; a plugin entry point in Megatron",
        "Megatron loads plugins by entry point",
    ),
    2: Header(
        "002-spec-name",
        "`--spec megatron_stability`, one name",
        "import_module unpacks exactly two names and raises ValueError for one",
        "none yet",
        "--spec takes a package that names its own spec",
    ),
    3: Header(
        "003-arguments",
        "the plugin's flags, and a call when the arguments are complete",
        "scripts pass their own extra_args_provider, so a flag of a plugin is unknown to an unmodified "
        "script; NaN checks have to be set before the model is wrapped",
        "none yet",
        "Megatron calls plugins when it parses arguments",
    ),
    4: Header(
        "004-update-gate",
        "a gate between the gradient norm and the optimizer step",
        "a step can only be withheld before step_with_ready_grads; grad_norm_skip_threshold is decided per "
        "rank, lets NaN through and exists in ChainedOptimizer only",
        "none yet",
        "MegatronOptimizer.step takes a pre-step hook that every rank answers alike",
    ),
    5: Header(
        "005-train-step",
        "three calls in train_step: before the forward, with the losses, after the optimizer",
        "the losses of a step are locals of train_step, and state that a forward changes (MoE expert bias) "
        "has to be kept before it",
        "none yet",
        "train_step has callbacks",
    ),
    6: Header(
        "006-train-loop",
        "a call before the first step, and a say in whether the loop goes on",
        "a halt has to leave the loop by Megatron's own door, with our exit code",
        "none yet",
        "the training loop has callbacks",
    ),
    7: Header(
        "007-log-line",
        "the plugin's fields on Megatron's log line, before the losses",
        "the line is built and printed inside training_log, and after steps without an update says a loss of 0",
        "none yet",
        "training_log has a hook",
    ),
    8: Header(
        "008-checkpoint-state",
        "detector and policy state in and out of a checkpoint",
        "baselines that are not saved make the first steps after a resume blind",
        "none yet",
        "the checkpoint takes state of plugins",
    ),
    9: Header(
        "009-loss",
        "the plugin's loss of the language-model and MTP heads (final softcap, z-loss), and its cap on logits "
        "returned as such",
        "logits meet labels inside compute_language_model_loss; no argument, config field or spec reaches it",
        "none; a loss function in the model's spec",
        "the head's loss can be given by a spec",
    ),
    10: Header(
        "010-checkpoint-complete",
        "a call before a checkpoint is written; the writer is handed out; two calls when it was: after the last "
        "rank, and for the tracker file",
        "a complete checkpoint is not written over; a checkpoint counts once its manifest and completion marker "
        "are on stable storage, and the tracker file may move only after that; a writer that fails on a full "
        "disk, on every rank alike, need not end the run",
        "none yet; 0.19 has an opt-in list of SHA-256 sums without a marker",
        "the save has a hook between its last byte and the tracker file",
    ),
    11: Header(
        "011-checkpoint-load",
        "a call before a checkpoint is loaded, and one when the strict load of a module fails",
        "only a complete and verified checkpoint may be loaded; a failed strict load is repeated with "
        "strict=False, which leaves weights at random values",
        "none yet",
        "the load has a hook, and the second attempt is an option",
    ),
    12: Header(
        "012-load-exit-code",
        "the exit code of a failed load",
        "sys.exit() without a code is 0: a scheduler takes a run that could not load for one that has finished",
        "none yet",
        "a failed load raises",
    ),
    13: Header(
        "013-pass-over",
        "a step whose samples are to be passed over: train_step draws them and does no more; the forward "
        "pre-hooks are only taken off for an evaluation where they are on",
        "--iterations-to-skip leaves the loop's body by `continue`, so that save, evaluation, exit interval "
        "and signal are passed over too; its dummy step knows neither virtual pipeline chunks nor stages "
        "without data",
        "none yet",
        "train() skips by sample and goes on to the end of its body",
    ),
    14: Header(
        "014-data-iterators",
        "a call before the data sets are built, and the data iterators, once they are",
        "data that can't be trained on are told before Megatron waits for them for ever; a rewind puts the "
        "iterators back to the checkpoint's cursor, and they are locals of pretrain() and train()",
        "none yet",
        "there is a callback before the data are built, and iterators have a cursor that can be set",
    ),
    15: Header(
        "015-rewind",
        "the loop goes on from another iteration after a rewind",
        "the iteration, the number of micro-batches and whether the forward pre-hooks are on are locals of train()",
        "none yet",
        "the training loop keeps its state in an object",
    ),
    16: Header(
        "016-held-out-loss",
        "a call with the losses of each validation set",
        "they are locals of evaluate_and_print_results, which prints them and forgets them",
        "none yet",
        "evaluation has a callback",
    ),
}
