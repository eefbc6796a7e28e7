"""Ray Serve: the router deployment (the door), the engine replicas, and the feed between them."""
