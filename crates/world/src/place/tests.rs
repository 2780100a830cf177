//! Placements from environments that launchers set.

use super::*;

const US: u32 = 4242;

fn start(flags: &Flags, variables: &str) -> Result<Start, String> {
    let env = |name: &str| {
        let found = variables.split_whitespace().filter_map(|word| word.split_once('='));
        found.filter(|(key, _)| *key == name).map(|(_, value)| value.to_string()).next()
    };
    place(flags, &env, US)
}

fn rank(variables: &str) -> RankPlacement {
    match start(&Flags::default(), variables) {
        Ok(Start::Rank(place)) => place,
        other => panic!("{other:?}"),
    }
}

fn address(host: &str, ports: Range<u16>, label: &str) -> Meeting {
    Meeting::Address { host: host.into(), ports, label: label.into() }
}

const TORCHRUN: &str = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2 ROLE_RANK=5 \
    ROLE_WORLD_SIZE=8 MASTER_ADDR=gpu-a MASTER_PORT=29500 TORCHELASTIC_RUN_ID=none TORCHELASTIC_USE_AGENT_STORE=True";
/// Rank 2 of `mpirun -n 4` with Open MPI 4.1.4 on one machine.
const OPEN_MPI: &str = "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=2 \
    OMPI_COMM_WORLD_LOCAL_SIZE=4 OMPI_COMM_WORLD_NODE_RANK=2 OMPI_FIRST_RANKS=0 OMPI_UNIVERSE_SIZE=2 PMIX_RANK=2 \
    PMIX_NAMESPACE=399835137";
/// Rank 3 of `mpirun -n 4` with MPICH 4.0.2 on one machine.
const MPICH: &str = "PMI_RANK=3 PMI_SIZE=4 PMI_FD=18 MPI_LOCALRANKID=3 MPI_LOCALNRANKS=4 HYDI_CONTROL_FD=7";
/// Task 2 of `srun --ntasks 4` with SLURM 22.05.8 on one node.
const SRUN: &str = "SLURM_CPUS_ON_NODE=8 SLURM_GTIDS=0,1,2,3 SLURM_JOBID=2 SLURM_JOB_ID=2 SLURM_JOB_NODELIST=localhost \
    SLURM_JOB_NUM_NODES=1 SLURM_LOCALID=2 SLURM_NNODES=1 SLURM_NODEID=0 SLURM_NODELIST=localhost SLURM_NPROCS=4 SLURM_NTASKS=4 \
    SLURM_PROCID=2 SLURM_STEPID=0 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=localhost SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=4 \
    SLURM_STEP_TASKS_PER_NODE=4 SLURM_TASKS_PER_NODE=4";
/// The script of `sbatch --ntasks 4` there.
const SBATCH: &str = "SLURM_CPUS_ON_NODE=8 SLURM_GTIDS=0 SLURM_JOBID=3 SLURM_JOB_ID=3 SLURM_JOB_NODELIST=localhost \
    SLURM_JOB_NUM_NODES=1 SLURM_LOCALID=0 SLURM_NNODES=1 SLURM_NODEID=0 SLURM_NODELIST=localhost SLURM_NPROCS=4 SLURM_NTASKS=4 \
    SLURM_PROCID=0 SLURM_TASKS_PER_NODE=4";
/// Rank 1 of `mpirun -n 2` with MPICH inside that job, whose launcher is the only task of a step.
const MPICH_IN_SBATCH: &str = "PMI_RANK=1 PMI_SIZE=2 PMI_FD=6 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 SLURM_JOB_ID=3 SLURM_LOCALID=0 \
    SLURM_NODEID=0 SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_STEPID=1 SLURM_STEP_ID=1 SLURM_STEP_NODELIST=localhost \
    SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1";
/// Task 1 of `srun --ntasks 2 --mpi=pmi2`.
const SRUN_PMI2: &str = "PMI_FD=13 PMI_JOBID=6.0 PMI_RANK=1 PMI_SIZE=2 SLURM_JOB_ID=6 SLURM_LOCALID=1 SLURM_MPI_TYPE=pmi2 \
    SLURM_NODEID=0 SLURM_NTASKS=2 SLURM_PROCID=1 SLURM_STEPID=0 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=localhost \
    SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2";
/// From SLURM's documentation, not recorded: a task on the second of two nodes.
const SRUN_TWO_NODES: &str = "SLURM_JOB_ID=1207 SLURM_STEP_ID=0 SLURM_PROCID=6 SLURM_LOCALID=2 SLURM_NODEID=1 SLURM_NTASKS=8 \
    SLURM_STEP_NUM_TASKS=8 SLURM_STEP_NUM_NODES=2 SLURM_STEP_TASKS_PER_NODE=4(x2) SLURM_STEP_NODELIST=gpu-[07-08] \
    SLURM_JOB_NODELIST=gpu-[07-08]";

/// A step with one task on each of two nodes, which start the ranks.
fn one_task_a_node() -> String {
    SRUN_TWO_NODES
        .replace("NUM_TASKS=8", "NUM_TASKS=2")
        .replace("PROCID=6", "PROCID=1")
        .replace("4(x2)", "1(x2)")
}

#[test]
fn recorded_environments_of_every_launcher() {
    assert_eq!(rank(""), RankPlacement::alone());
    assert_eq!(rank("RANK=colonel"), RankPlacement::alone(), "without a size it is some other program's");
    let torchrun = rank(TORCHRUN);
    assert_eq!((torchrun.rank, torchrun.ranks, torchrun.local, torchrun.node), (5, 8, Some((1, 4)), Some(1)));
    assert_eq!(torchrun.meeting, address("gpu-a", 29500..29516, "none"));

    let open_mpi = rank(OPEN_MPI);
    assert_eq!((open_mpi.rank, open_mpi.ranks, open_mpi.local, open_mpi.node), (2, 4, Some((2, 4)), None));
    assert_eq!(open_mpi.meeting, Meeting::Folder);
    let named = rank(&format!("{OPEN_MPI} MASTER_ADDR=10.0.0.1 MASTER_PORT=4000"));
    assert_eq!(named.meeting, address("10.0.0.1", 4000..4016, "399835137"));

    let mpich = rank(MPICH);
    assert_eq!((mpich.rank, mpich.ranks, mpich.local), (3, 4, Some((3, 4))));
    assert_eq!(mpich.meeting, Meeting::Folder);

    let srun = rank(SRUN);
    assert_eq!((srun.rank, srun.ranks, srun.local, srun.node), (2, 4, Some((2, 4)), Some(0)));
    let Meeting::Address { host, label, .. } = srun.meeting else { panic!("SLURM names a host") };
    assert_eq!((host.as_str(), label.as_str()), ("localhost", "slurm 2.0"));
    let with_pmi2 = rank(SRUN_PMI2);
    assert_eq!((with_pmi2.rank, with_pmi2.ranks, with_pmi2.node), (1, 2, Some(0)));
    assert!(matches!(with_pmi2.meeting, Meeting::Address { .. }), "SLURM names a host, and MPI does not");

    let srun = rank(SRUN_TWO_NODES);
    assert_eq!((srun.rank, srun.ranks, srun.local, srun.node), (6, 8, Some((2, 4)), Some(1)));
    let Meeting::Address { host, ports, label } = srun.meeting else { panic!("SLURM names a host") };
    assert_eq!((host.as_str(), label.as_str(), ports.len()), ("gpu-07", "slurm 1207.0", 16));
    assert!((20000..40000).contains(&ports.start));
    let other = rank(&SRUN_TWO_NODES.replace("STEP_ID=0", "STEP_ID=1"));
    assert_ne!(other.meeting, rank(SRUN_TWO_NODES).meeting, "two steps of a job do not meet");

    assert_eq!(rank(SBATCH), RankPlacement::alone(), "a batch script without srun is one process");
    let interactive =
        "SLURM_STEP_ID=4294967290 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_NODELIST=gpu-07";
    assert_eq!(rank(interactive), RankPlacement::alone());
}

#[test]
fn the_inner_launcher_wins() {
    let inside = rank(&format!("{TORCHRUN} {}", one_task_a_node()));
    assert_eq!((inside.rank, inside.ranks), (5, 8), "srun starts torchrun, one a node");
    let inside = rank(&format!("{OPEN_MPI} {}", one_task_a_node()));
    assert_eq!((inside.rank, inside.ranks), (2, 4), "mpirun starts its daemons with srun");
    let inside = rank(MPICH_IN_SBATCH);
    assert_eq!((inside.rank, inside.ranks, inside.local), (1, 2, Some((1, 2))));
    let inside = rank(&format!("{OPEN_MPI} {SBATCH}"));
    assert_eq!((inside.rank, inside.ranks), (2, 4), "Open MPI starts ranks of one node itself");
}

#[test]
fn flags_start_copies() {
    let ranks = |ranks| Flags { ranks: Some(ranks), ..Flags::default() };
    assert_eq!(start(&ranks(4), ""), Ok(Start::Copies(Copies { here: 4, node: 0, nodes: 1 })));
    assert_eq!(start(&ranks(1), ""), Ok(Start::Rank(RankPlacement::alone())));
    let nodes = Flags { nodes: Some(2), node: Some(1), address: Some("gpu-a:4000".into()), ..ranks(4) };
    assert_eq!(start(&nodes, ""), Ok(Start::Copies(Copies { here: 4, node: 1, nodes: 2 })));
    assert_eq!(start(&nodes, SBATCH), Ok(Start::Copies(Copies { here: 4, node: 1, nodes: 2 })));
    assert_eq!(start(&nodes, &one_task_a_node()), Ok(Start::Copies(Copies { here: 4, node: 1, nodes: 2 })));

    let copy = "FLATOUT_PARENT=4242 FLATOUT_RANK=6 FLATOUT_RANKS=8 FLATOUT_LOCAL_RANK=2 FLATOUT_LOCALS=4 FLATOUT_NODE=1";
    let Ok(Start::Rank(place)) = start(&nodes, copy) else { panic!("a copy is a rank") };
    assert_eq!((place.rank, place.ranks, place.local, place.node), (6, 8, Some((2, 4)), Some(1)));
    assert!(place.has_parent);
    assert_eq!(place.meeting, address("gpu-a", 4000..4001, ""));
    let Ok(Start::Rank(place)) = start(&ranks(8), copy) else { panic!("a copy is a rank") };
    assert_eq!(place.meeting, Meeting::Parent);
    let inherited = copy.replace("4242", "17");
    assert_eq!(
        start(&ranks(8), &inherited),
        start(&ranks(8), ""),
        "another process's variables are no place"
    );
}

#[test]
fn contradictions_are_refused_with_a_sentence() {
    let flags = |ranks, nodes, node, address: Option<&str>| Flags {
        ranks,
        nodes,
        node,
        address: address.map(Into::into),
    };
    let none = Flags::default();
    let four = flags(Some(4), None, None, None);
    let at = Some("gpu-a:4000");
    let less = TORCHRUN.replace("WORLD_SIZE=8", "WORLD_SIZE=1").replace("RANK=5", "RANK=0");
    for (flags, variables, told) in [
        (&four, TORCHRUN, "--ranks starts processes, and torchrun has started 8 already (WORLD_SIZE)"),
        (&four, OPEN_MPI, "Open MPI has started 4 already (OMPI_COMM_WORLD_SIZE)"),
        (&four, MPICH, "MPI has started 4 already (PMI_SIZE)"),
        (&four, SRUN_TWO_NODES, "SLURM has started 8 already (SLURM_STEP_NUM_TASKS)"),
        (
            &none,
            &format!("{less} {SRUN_TWO_NODES}"),
            "WORLD_SIZE=1 and SLURM_STEP_NUM_TASKS=8 contradict each other",
        ),
        (&none, "WORLD_SIZE=4", "WORLD_SIZE=4 is set and RANK is not"),
        (&none, "RANK=0 WORLD_SIZE=4", "MASTER_ADDR is not: set it to the host of rank 0"),
        (&none, "RANK=4 WORLD_SIZE=4 MASTER_ADDR=a", "torchrun says that this is rank 4 of 4"),
        (&none, "RANK=x WORLD_SIZE=4", "RANK=x is not a number"),
        (&none, "RANK=0 WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=70000", "MASTER_PORT=70000 is not a port"),
        (
            &none,
            &SRUN_TWO_NODES.replace("gpu-[07-08]", "gpu-[07"),
            "SLURM_STEP_NODELIST: `gpu-[07` is no list of hosts",
        ),
        (
            &none,
            &SRUN_TWO_NODES.replace("4(x2)", "4(x"),
            "SLURM_STEP_TASKS_PER_NODE=4(x is not what SLURM writes",
        ),
        (&flags(Some(0), None, None, None), "", "--ranks 0 starts nothing"),
        (&flags(None, Some(2), None, None), "", "--nodes needs --ranks"),
        (&flags(None, None, None, at), "", "--address needs --ranks"),
        (&flags(Some(4), None, Some(1), None), "", "--node needs --nodes"),
        (&flags(Some(4), Some(2), None, at), "", "--nodes 2 needs --node"),
        (&flags(Some(4), Some(2), Some(2), at), "", "--node 2 is not below --nodes 2"),
        (&flags(Some(4), Some(2), Some(1), None), "", "--nodes 2 needs --address HOST:PORT"),
        (&flags(Some(4), Some(2), Some(1), Some("gpu-a")), "", "--address gpu-a is not HOST:PORT"),
        (&flags(Some(4), Some(2), Some(1), Some("gpu-a:0")), "", "--address gpu-a:0 is not HOST:PORT"),
    ] {
        let sentence = start(flags, variables).unwrap_err();
        assert!(sentence.contains(told), "{variables}: {sentence}");
    }
}

#[test]
fn addresses_have_hosts_of_either_family() {
    assert_eq!(host_and_port("[fd00::1]:4000"), Ok(("fd00::1".into(), 4000)));
    assert_eq!(host_and_port("10.0.0.1:4000"), Ok(("10.0.0.1".into(), 4000)));
}

#[test]
fn tasks_of_nodes_are_read_in_the_short_form() {
    let tasks = |node| tasks_of("4(x2),1,2(x3)", node).unwrap();
    assert_eq!([0, 1, 2, 3, 5, 6].map(tasks), [Some(4), Some(4), Some(1), Some(2), Some(2), None]);
}
