"""The path that the two-name `--spec` gives: `--spec megatron_stability.megatron.layer_specs stability_layer_spec`."""

from megatron_stability.megatron.model.layer_specs import stability_layer_spec

__all__ = ["stability_layer_spec"]  # Megatron looks it up in `vars(module)`
