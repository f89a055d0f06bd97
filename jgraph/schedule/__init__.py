"""Pipeline schedules: parse, validate, generate and simulate them. Does not import jax."""

from jgraph.schedule._choose import Candidate as Candidate, Choice as Choice, best as best
from jgraph.schedule._generate import NAMES as NAMES, generate as generate
from jgraph.schedule._megatron import megatron_order as megatron_order
from jgraph.schedule._slots import POOLS as POOLS, Slots as Slots, assign as assign
from jgraph.schedule.action import Action as Action
from jgraph.schedule.files import read as read, write as write
from jgraph.schedule.order import Order as Order
from jgraph.schedule.schedule import Schedule as Schedule, loop as loop, vee as vee
from jgraph.schedule.simulate import Costs as Costs, Simulation as Simulation, simulate as simulate
from jgraph.schedule.tables import phases as phases, tabulate as tabulate
