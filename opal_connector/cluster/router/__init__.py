"""The router: which instance serves a request, and the HTTP that carries it there."""
