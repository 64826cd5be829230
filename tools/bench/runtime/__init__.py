"""How close the runtime comes to what its schedules allow, side by side with torch.distributed.pipelining."""
