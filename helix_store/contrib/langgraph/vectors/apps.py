from helix_store.contrib import _frameworks


class LangGraphVectorsConfig(_frameworks.FrameworkConfig):
    name = "helix_store.contrib.langgraph.vectors"
    label = "helix_store_langgraph_vectors"
    verbose_name = "LangGraph vectors"
