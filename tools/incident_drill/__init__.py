"""A drill: twelve incidents, brought upon real gateways, and what these say of each to whoever has never seen one."""
