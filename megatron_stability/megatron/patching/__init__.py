"""Opens seams in Megatron's source, on disk or in memory; imports no Megatron itself, but for `install_digest.py`.

Read `seam_table.py` (every seam, by its anchor), `place.py` (where an anchor stands, or why nowhere), `splice.py` (text
put in and taken out), `series.py` (the diffs that follow); then `tree.py` (what stands in a Megatron tree),
`on_disk.py` and `in_memory.py` (the two ways to apply); `command.py` with `survey.py` is the command line. `diff.py`
and `patch_set.py` read the committed diffs, which decide in the releases that have them.
"""
