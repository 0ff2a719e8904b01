"""A drill: nine incidents, brought upon real gateways, and what these say of each to somebody who has never seen one."""
