"""Several engines and the router before them: started, watched, scaled and stopped together."""
