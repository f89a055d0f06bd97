"""Pipeline schedules: parse, check, generate, simulate and draw them. Does not import jax."""

from jgraph.schedule.action import Action as Action
from jgraph.schedule.choose import Candidate as Candidate
from jgraph.schedule.choose import Choice as Choice
from jgraph.schedule.choose import Engine as Engine
from jgraph.schedule.choose import best as best
from jgraph.schedule.files import read as read
from jgraph.schedule.files import write as write
from jgraph.schedule.generate import NAMES as NAMES
from jgraph.schedule.generate import generate as generate
from jgraph.schedule.megatron import megatron_order as megatron_order
from jgraph.schedule.order import Order as Order
from jgraph.schedule.schedule import Schedule as Schedule
from jgraph.schedule.schedule import loop as loop
from jgraph.schedule.schedule import vee as vee
from jgraph.schedule.simulate import Costs as Costs
from jgraph.schedule.simulate import Simulation as Simulation
from jgraph.schedule.simulate import simulate as simulate
from jgraph.schedule.slots import POOLS as POOLS
from jgraph.schedule.slots import Slots as Slots
from jgraph.schedule.slots import assign as assign
from jgraph.schedule.tables import phases as phases
from jgraph.schedule.tables import tabulate as tabulate
