"""One strict YAML file and what may override it. Pydantic lives here and nowhere else."""
