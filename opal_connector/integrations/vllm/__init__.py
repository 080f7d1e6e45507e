"""vLLM: the connector's facade, its scheduler half and its worker half."""
