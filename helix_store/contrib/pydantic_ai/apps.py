from helix_store.contrib import _frameworks


class PydanticAIConfig(_frameworks.FrameworkConfig):
    name = "helix_store.contrib.pydantic_ai"
    label = "helix_store_pydantic_ai"
    verbose_name = "Pydantic AI"
