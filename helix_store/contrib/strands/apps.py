from helix_store.contrib import _frameworks


class StrandsConfig(_frameworks.FrameworkConfig):
    name = "helix_store.contrib.strands"
    label = "helix_store_strands"
    verbose_name = "Strands Agents"
