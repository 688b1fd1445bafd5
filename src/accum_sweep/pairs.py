"""Rules between settings: which exclude each other, and which would do nothing where another is as it is."""

from collections.abc import Iterator

from accum_sweep.config import Config
from accum_sweep.errors import Fault


def pair_faults(config: Config) -> Iterator[Fault]:
    """Find settings that exclude each other, and settings that would do nothing."""
    alone, several = config.processes == 1, f"{config.processes} processes"
    if config.clip_norm is not None and config.clip_value is not None:
        both = f"{config.clip_norm} with clip_value={config.clip_value}"
        yield Fault("clip_norm", both, "clip_norm and clip_value exclude each other", "give one of them")
    if config.device == "mps" and config.precision in ("fp64", "tf32"):
        rule = f"device=mps has no {config.precision}"
        yield Fault("precision", config.precision, rule, "use precision=fp32 or device=cpu")
    if config.device == "cpu" and config.precision == "tf32":
        yield Fault("precision", "tf32", "only CUDA devices have TF32", "use precision=fp32 or device=cuda")
    if config.accumulator is not None and config.precision != "bf16-params":
        rule = f"changes nothing under precision={config.precision}, whose gradients are no less precise"
        yield Fault("accumulator", config.accumulator, rule, "leave it out, or use precision=bf16-params")
    if config.accumulator is not None and not alone:
        rule = f"cannot be used by {several}, which synchronize the gradients themselves"
        yield Fault("accumulator", config.accumulator, rule, "leave it out, or use precision=bf16")
    if config.batchnorm == "corrected_momentum" and config.accum_schedule is not None:
        rule = "needs windows of one length, but accum_schedule changes it"
        yield Fault("batchnorm", config.batchnorm, rule, "use batchnorm=train or eval")
    if config.parallel == "fsdp" and alone:
        yield Fault("parallel", "fsdp", "needs several processes", "start with torchrun --nproc-per-node=2")
    if config.sync_every_micro_batch and alone:
        rule = "changes nothing in one process"
        yield Fault("sync_every_micro_batch", "true", rule, "leave it out, or start with torchrun")
    if config.parallel == "fsdp" and not alone:
        if config.precision == "fp16":
            rule = "cannot be used with parallel=fsdp: each rank would see the overflows of its own part only"
            yield Fault("precision", "fp16", rule, "use precision=bf16 or parallel=ddp")
        if config.clip_value is not None:
            rule = "cannot be used with parallel=fsdp"
            yield Fault("clip_value", config.clip_value, rule, "use clip_norm or parallel=ddp")
    if config.compile and not alone:
        yield Fault("compile", "true", f"cannot be used by {several}", "leave it out")
    if config.fused_linear:
        yield from _fused_linear_faults(config)
    if config.step_in_backward:
        yield from _step_in_backward_faults(config)


def _fused_linear_faults(config: Config) -> Iterator[Fault]:
    """Find what needs each micro-batch's gradient by itself, so that nothing could be added where it is computed."""
    if config.precision in ("bf16", "fp16"):
        rule = f"changes nothing under precision={config.precision}, which converts each gradient before it is added"
        yield Fault("fused_linear", "true", rule, "leave it out, or use precision=fp32 or bf16-params")
    if config.accumulator is not None:
        rule = "changes nothing with an accumulator, which adds the gradients itself"
        yield Fault("fused_linear", "true", rule, "leave one of them out")
    if config.step_in_backward:
        rule = "changes nothing with step_in_backward=true, where no gradient is added to another"
        yield Fault("fused_linear", "true", rule, "leave one of them out")
    if config.compile:
        rule = "cannot be used with compile=true, which leaves out every layer that is fused"
        yield Fault("fused_linear", "true", rule, "leave one of them out")
    if config.processes > 1:
        rule = f"cannot be used by {config.processes} processes, which wait for each gradient to be made"
        yield Fault("fused_linear", "true", rule, "leave it out")


def _step_in_backward_faults(config: Config) -> Iterator[Fault]:
    """Find what needs the whole gradient, before a weight moves or after several backward passes."""
    whole = "needs the whole gradient before a weight moves, but step_in_backward=true lets go of it piece by piece"
    if config.clip_norm is not None:
        yield Fault("clip_norm", config.clip_norm, whole, "leave one of them out")
    if config.clip_value is not None:
        yield Fault("clip_value", config.clip_value, whole, "leave one of them out")
    if config.on_nonfinite == "skip":
        yield Fault("on_nonfinite", "skip", whole, "use on_nonfinite=stop, or leave step_in_backward out")
    if config.precision == "fp16":
        rule = "has a gradient scaler, which " + whole
        yield Fault("precision", "fp16", rule, "use precision=bf16, or leave step_in_backward out")
    lengths = {steps for _, steps in config.accum_schedule or ()} | {config.accum_steps or 1}
    if config.automatic or lengths != {1}:
        rule = "needs windows of one micro-batch: every backward pass moves the weights"
        yield Fault("step_in_backward", "true", rule, "use accum_steps=1, or leave it out")
    if config.accumulator is not None:
        rule = "changes nothing with step_in_backward=true, where no gradient is added to another"
        yield Fault("accumulator", config.accumulator, rule, "leave one of them out")
    if config.compile:
        rule = "saves nothing with compile=true, whose backward pass makes all gradients before it hands one out"
        yield Fault("step_in_backward", "true", rule, "leave one of them out")
    if config.processes > 1:
        rule = f"cannot be used by {config.processes} processes, which synchronize gradients before a weight may move"
        yield Fault("step_in_backward", "true", rule, "leave it out")
