"""What Megatron's flags do: the table of arguments, refusals row by row, CUDA graphs."""
