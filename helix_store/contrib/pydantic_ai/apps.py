from helix_store.contrib import _apps


class PydanticAIConfig(_apps.FrameworkConfig):
    name = "helix_store.contrib.pydantic_ai"
    label = "helix_store_pydantic_ai"
    verbose_name = "Pydantic AI"
