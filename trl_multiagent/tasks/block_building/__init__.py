from trl_multiagent.tasks.block_building.data import load_block_dataset
from trl_multiagent.tasks.block_building.environment import BlockBuildingEnvironment
from trl_multiagent.tasks.block_building.picture import draw_build


__all__ = ["BlockBuildingEnvironment", "draw_build", "load_block_dataset"]
