/* Random schedules over the whole core, ranks as threads; see schedule.h. Says how to run again what has failed. */
#include <execinfo.h>
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "rank.h"

enum { STACK_FRAMES = 40, LOOK_MS = 2, STACK_MS = 50 };

struct options {
    uint64_t seed;
    int has_seed;
    uint64_t schedules;
    double seconds; /* 0: as many as schedules says */
    double deadline_s;
    int quiet;
    struct limits limits;
};

static double now_s(void) {
    struct timespec time;
    (void)clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void nap(int ms) {
    const struct timespec time = {.tv_nsec = ms * 1000000l};
    (void)nanosleep(&time, NULL);
}

/* ---- The watchdog ---- */

static void print_stack(int number) {
    (void)number;
    void *frames[STACK_FRAMES];
    backtrace_symbols_fd(frames, backtrace(frames, STACK_FRAMES), STDERR_FILENO);
}

/*
 * One thread after the other: each gets the time to write its stack. The core's own block all signals: see them in the
 * core file.
 */
static void print_stacks(void) {
    const struct sigaction action = {.sa_handler = print_stack};
    DIR *tasks = opendir("/proc/self/task");
    if (tasks == NULL || sigaction(SIGUSR2, &action, NULL) != 0) {
        return;
    }
    (void)fprintf(stderr, "stacks of all threads; `addr2line -fe PROGRAM +0x...` tells the function of an address:\n");
    const pid_t own = (pid_t)syscall(SYS_gettid);
    for (const struct dirent *entry = readdir(tasks); entry != NULL; entry = readdir(tasks)) {
        const pid_t thread = (pid_t)atoi(entry->d_name);
        if (thread > 0 && thread != own) {
            (void)fprintf(stderr, "thread %d:\n", thread);
            (void)syscall(SYS_tgkill, getpid(), thread, SIGUSR2);
            nap(STACK_MS);
        }
    }
    (void)closedir(tasks);
}

static void await_ranks(struct run *run, double deadline_s) {
    const double end_s = now_s() + deadline_s;
    while (atomic_load(&run->over) < run->schedule->size) {
        if (now_s() < end_s) {
            nap(LOOK_MS);
            continue;
        }
        char text[512];
        schedule_describe(run->schedule, text, sizeof text);
        (void)fprintf(stderr, "stress: not over after %g s\n  %s\n", deadline_s, text);
        run_describe(run);
        print_stacks();
        (void)fprintf(stderr, "again: %s\n", run->replay);
        abort();
    }
}

/* ---- A schedule ---- */

static int create_contexts(struct run *run) {
    for (int i = 0; i < run->schedule->size; i++) {
        char error[HORO_MESSAGE_MAX];
        const int status = horo_create(&run->fabric.setups[i], &run->ranks[i].context, error, sizeof error);
        if (status != HORO_OK) {
            (void)fprintf(stderr, "stress: rank %d: %s: %s\nagain: %s\n", i, horo_status_name(status), error,
                          run->replay);
            return -1;
        }
    }
    return 0;
}

static int run_ranks(struct run *run, double deadline_s) {
    const int size = run->schedule->size;
    for (int i = 0; i < size; i++) {
        run->ranks[i].run = run;
        run->ranks[i].number = i;
    }
    if (create_contexts(run) != 0 || pthread_barrier_init(&run->settled, NULL, (unsigned)size) != 0) {
        return -1;
    }
    for (int i = 0; i < size; i++) {
        if (pthread_create(&run->ranks[i].thread, NULL, rank_main, &run->ranks[i]) != 0) {
            (void)fprintf(stderr, "stress: no thread for rank %d\n", i);
            return -1;
        }
    }
    await_ranks(run, deadline_s);
    for (int i = 0; i < size; i++) {
        (void)pthread_join(run->ranks[i].thread, NULL);
    }
    (void)pthread_barrier_destroy(&run->settled);
    return 0;
}

/* When all ranks are over. */
static int judge_whole(struct run *run) {
    const int64_t torn = oracle_find_torn(&run->oracle);
    if (torn < 0) {
        return 0;
    }
    char text[512];
    operation_describe(run->schedule, &run->schedule->operations[torn], text, sizeof text);
    (void)fprintf(stderr, "stress: operation %lld was decided on some of its ranks only, on %d: %s\n", (long long)torn,
                  atomic_load(&run->oracle.decided[torn]), text);
    schedule_describe(run->schedule, text, sizeof text);
    (void)fprintf(stderr, "  %s\nagain: %s\n", text, run->replay);
    return -1;
}

static void prepare(struct run *run, uint64_t seed, const struct limits *limits, int quiet) {
    (void)snprintf(run->replay, sizeof run->replay,
                   "stress --seed %llu --operations %zu --max-size %lld --hosts %d --teams %d%s%s",
                   (unsigned long long)seed, limits->operations, (long long)limits->elements, limits->hosts,
                   limits->teams, limits->together ? " --together" : "", limits->moving ? " --moving" : "");
    if (!quiet) {
        char text[512];
        schedule_describe(run->schedule, text, sizeof text);
        (void)printf("seed %llu: %s\n", (unsigned long long)seed, text);
        (void)fflush(stdout);
    }
}

static int64_t count_finished(const struct run *run) {
    int64_t finished = 0;
    for (int i = 0; i < run->schedule->size; i++) {
        finished += (int64_t)atomic_load(&run->ranks[i].finished);
    }
    return finished;
}

static void free_run(struct run *run) {
    if (run != NULL) {
        oracle_free(&run->oracle);
        free(run->ranks);
        free(run);
    }
}

/* Returns how many operations the ranks have finished, all together; -1: it could not be run, or is wrong. */
static int64_t run_seed(uint64_t seed, const struct options *options) {
    struct schedule *schedule = calloc(1, sizeof *schedule);
    struct run *run = calloc(1, sizeof *run);
    int64_t finished = -1;
    if (run == NULL || schedule == NULL || (run->ranks = calloc(RANKS_MAX, sizeof *run->ranks)) == NULL ||
        schedule_make(seed, &options->limits, schedule) != 0 || oracle_init(&run->oracle, schedule) != 0) {
        (void)fprintf(stderr, "stress: no memory\n");
    } else {
        run->schedule = schedule;
        prepare(run, seed, &options->limits, options->quiet);
        if (fabric_make(schedule, &run->fabric) != 0) {
            (void)fprintf(stderr, "stress: no descriptors or memory: %s\n", strerror(errno));
        } else if (run_ranks(run, options->deadline_s) == 0 && judge_whole(run) == 0) {
            finished = count_finished(run);
            fabric_free(&run->fabric);
        }
        schedule_free(schedule);
    }
    free_run(run);
    free(schedule);
    return finished;
}

/* ---- The command line ---- */

static int usage(const char *what) {
    (void)fprintf(
        stderr,
        "stress: %s\nusage: stress [--seed N] [--schedules N | --seconds S] [--operations N] [--max-size ELEMENTS]\n"
        "              [--hosts MOST] [--teams MOST] [--together] [--moving] [--deadline S] [--quiet]\n"
        "Without a seed a fresh one. --teams: at a time, besides that of all ranks, 0 to 8 (3). --together: no rank\n"
        "leaves early or dies. --moving: only operations that move data. A schedule that is not over after the\n"
        "deadline (60 s) has failed.\n",
        what);
    return 2;
}

static int parse_value(const char *name, const char *text, struct options *options) {
    char *end = NULL;
    const double number = strtod(text, &end);
    if (*text == '\0' || *end != '\0' || !(number >= 0)) {
        return -1;
    }
    if (strcmp(name, "--seed") == 0) {
        options->seed = strtoull(text, NULL, 10);
        options->has_seed = 1;
    } else if (strcmp(name, "--schedules") == 0) {
        options->schedules = (uint64_t)number;
    } else if (strcmp(name, "--seconds") == 0) {
        options->seconds = number;
    } else if (strcmp(name, "--operations") == 0 && number >= 1) {
        options->limits.operations = (size_t)number;
    } else if (strcmp(name, "--max-size") == 0 && number >= 1) {
        options->limits.elements = (int64_t)number;
    } else if (strcmp(name, "--hosts") == 0 && number >= 1 && number <= HOSTS_MAX) {
        options->limits.hosts = (int)number;
    } else if (strcmp(name, "--teams") == 0 && number <= LIVE_MAX) {
        options->limits.teams = (int)number;
    } else if (strcmp(name, "--deadline") == 0) {
        options->deadline_s = number;
    } else {
        return -1;
    }
    return 0;
}

int main(int argc, char **argv) {
    struct options options = {.schedules = 1, .deadline_s = 60, .limits = {2000, 200000, HOSTS_MAX, 3, 0, 0}};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--quiet") == 0) {
            options.quiet = 1;
        } else if (strcmp(argv[i], "--together") == 0) {
            options.limits.together = 1;
        } else if (strcmp(argv[i], "--moving") == 0) {
            options.limits.moving = 1;
        } else if (i + 1 >= argc || parse_value(argv[i], argv[i + 1], &options) != 0) {
            return usage(argv[i]);
        } else {
            i++;
        }
    }
    if (!options.has_seed) {
        struct timespec time;
        (void)clock_gettime(CLOCK_REALTIME, &time);
        options.seed = ((uint64_t)time.tv_sec * 1000003u ^ (uint64_t)time.tv_nsec) % 1000000000u;
    }
    void *frame[1];
    (void)backtrace(frame, 1); /* loads what it needs, which a signal handler could not */
    const double begin_s = now_s();
    uint64_t done = 0;
    int64_t finished = 0;
    while (options.seconds > 0 ? now_s() - begin_s < options.seconds : done < options.schedules) {
        const int64_t count = run_seed(options.seed + done, &options);
        if (count < 0) {
            return 1;
        }
        finished += count;
        done++;
    }
    (void)printf("stress: seeds %llu to %llu: %lld operations of ranks in %.1f s\n", (unsigned long long)options.seed,
                 (unsigned long long)(options.seed + done - 1), (long long)finished, now_s() - begin_s);
    return 0;
}
