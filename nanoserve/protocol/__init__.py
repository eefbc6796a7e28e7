"""The wire: pydantic models of the OpenAI API, SSE, and the one table from error type to HTTP status."""
