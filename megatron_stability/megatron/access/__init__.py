"""Where Megatron keeps things: masters, optimizer, iterators, the host's globals; and the installed runtime."""
