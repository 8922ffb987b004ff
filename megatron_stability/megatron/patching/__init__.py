"""Opens seams in Megatron's source from unified diffs, on disk or in memory; imports no Megatron itself.

Read `diff.py` (one diff, pure), `patch_set.py` (the diffs of one megatron-core version), `tree.py` (what stands in a
Megatron tree), then `on_disk.py` and `in_memory.py` (the two ways to apply), and `command.py` (the command line).
"""
