"""`paceline bench`: a load generator for any OpenAI server, over HTTP alone."""
