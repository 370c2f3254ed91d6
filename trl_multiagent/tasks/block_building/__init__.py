from trl_multiagent.tasks.block_building.data import TASK, load_block_dataset
from trl_multiagent.tasks.block_building.environment import BlockBuildingEnvironment, draw_build


__all__ = ["TASK", "BlockBuildingEnvironment", "draw_build", "load_block_dataset"]
