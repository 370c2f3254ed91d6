from trl_multiagent.tasks.block_building.data import load_block_dataset
from trl_multiagent.tasks.block_building.environment import BlockBuildingEnvironment


__all__ = ["BlockBuildingEnvironment", "load_block_dataset"]
