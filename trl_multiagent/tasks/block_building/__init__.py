from trl_multiagent.tasks.block_building.data import TASK, load_block_dataset
from trl_multiagent.tasks.block_building.environment import BlockBuildingEnvironment


__all__ = ["TASK", "BlockBuildingEnvironment", "load_block_dataset"]
