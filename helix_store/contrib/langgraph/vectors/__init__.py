"""Embeddings of LangGraph's long-term memory, for the vector search of `DjangoStore` on PostgreSQL."""
