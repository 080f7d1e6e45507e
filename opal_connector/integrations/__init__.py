"""Host engines. Only this room imports them."""
