"""`megatron-stability compare`: an FP8 run against its BF16 control, with a gate."""
