from helix_store.contrib import _apps


class StrandsConfig(_apps.FrameworkConfig):
    name = "helix_store.contrib.strands"
    label = "helix_store_strands"
    verbose_name = "Strands Agents"
