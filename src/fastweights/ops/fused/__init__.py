"""What layers compute around the memory, in one kernel where there is one."""
