package lancewal;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import org.apache.spark.sql.catalyst.analysis.NoSuchTableException;
import org.apache.spark.sql.catalyst.analysis.TableAlreadyExistsException;
import org.apache.spark.sql.catalyst.parser.CatalystSqlParser$;
import org.apache.spark.sql.connector.catalog.Identifier;
import org.apache.spark.sql.connector.catalog.ProcedureCatalog;
import org.apache.spark.sql.connector.catalog.StagedTable;
import org.apache.spark.sql.connector.catalog.StagingTableCatalog;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCatalogCapability;
import org.apache.spark.sql.connector.catalog.TableChange;
import org.apache.spark.sql.connector.catalog.TableInfo;
import org.apache.spark.sql.connector.catalog.constraints.Constraint;
import org.apache.spark.sql.connector.catalog.constraints.PrimaryKey;
import org.apache.spark.sql.connector.catalog.procedures.UnboundProcedure;
import org.apache.spark.sql.connector.expressions.Expression;
import org.apache.spark.sql.connector.expressions.Literal;
import org.apache.spark.sql.connector.expressions.NamedReference;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.internal.SQLConf;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import scala.jdk.javaapi.CollectionConverters;

/**
 * The tables below one directory: {@code spark.sql.catalog.lance = lancewal.LanceCatalog} with
 * {@code spark.sql.catalog.lance.root}. A name with a slash is a path of its own.
 *
 * <p>It stages tables only because Spark drops a table that is to be replaced before it creates the other one,
 * unless the catalog does both.
 */
public final class LanceCatalog implements StagingTableCatalog, ProcedureCatalog {
  private static final String ROOT = "root";
  /** Properties that Spark adds by itself. */
  private static final Set<String> SPARKS_OWN = Set.of(PROP_PROVIDER, PROP_OWNER, PROP_COMMENT, PROP_EXTERNAL);

  private String name;
  private String root;
  private Map<String, String> settings;

  @Override
  public void initialize(String name, CaseInsensitiveStringMap options) {
    this.name = name;
    this.root = options.get(ROOT);
    this.settings = new HashMap<>(options.asCaseSensitiveMap());
    settings.keySet().removeIf(ROOT::equalsIgnoreCase);
  }

  @Override
  public String name() {
    return name;
  }

  @Override
  public Set<TableCatalogCapability> capabilities() {
    return Set.of(TableCatalogCapability.SUPPORT_TABLE_CONSTRAINT);
  }

  @Override
  public String[] defaultNamespace() {
    return new String[0];
  }

  @Override
  public Identifier[] listTables(String[] namespace) {
    if (root == null) {
      return new Identifier[0];
    }
    Map<String, String> place = new HashMap<>(settings);
    place.put("path", root + String.join("", Arrays.stream(namespace).map(part -> "/" + part).toList()));
    JsonNode found =
        Refusals.shown(() -> PythonCalls.ask("list", place, PythonCalls.JSON.createObjectNode()));
    return Arrays.stream(PythonCalls.JSON.convertValue(found.get("tables"), String[].class))
        .map(table -> Identifier.of(namespace, table))
        .toArray(Identifier[]::new);
  }

  @Override
  public Table loadTable(Identifier table) throws NoSuchTableException {
    return load(table, options(table));
  }

  /** VERSION AS OF the name of a checkpoint. */
  @Override
  public Table loadTable(Identifier table, String checkpoint) throws NoSuchTableException {
    Map<String, String> options = options(table);
    options.put("versionAsOf", checkpoint);
    return load(table, options);
  }

  /** TIMESTAMP AS OF; without this Spark says that there is no such table. */
  @Override
  public Table loadTable(Identifier table, long timestamp) {
    throw new UnsupportedOperationException(
        "the state of a table at any past time is not kept; VERSION AS OF reads a checkpoint by its name");
  }

  private LanceTable load(Identifier table, Map<String, String> options) throws NoSuchTableException {
    try {
      return new LanceTable(name + "." + table, options, PythonCalls.describe(options));
    } catch (PythonCalls.RefusedException refused) {
      if (refused.kind.equals("TableNotFoundError")) {
        throw new NoSuchTableException(table);
      }
      return Refusals.shown(
          () -> {
            throw refused;
          });
    }
  }

  @Override
  public Table createTable(Identifier table, TableInfo info) throws TableAlreadyExistsException {
    return created(table, info);
  }

  /** CREATE TABLE … AS SELECT: a table that is there from the start, and is dropped if the rows fail. */
  @Override
  public StagedTable stageCreate(Identifier table, TableInfo info) throws TableAlreadyExistsException {
    return new Staged(created(table, info), () -> dropTable(table));
  }

  @Override
  public StagedTable stageReplace(Identifier table, TableInfo info) {
    throw notReplaced(table);
  }

  @Override
  public StagedTable stageCreateOrReplace(Identifier table, TableInfo info) {
    throw notReplaced(table);
  }

  private UnsupportedOperationException notReplaced(Identifier table) {
    return new UnsupportedOperationException(
        "a table is not replaced, because its rows and those that others write meanwhile would be lost, also if "
            + "the new one fails. Create another table, or DROP TABLE "
            + name
            + "."
            + table
            + " first; CREATE TABLE IF NOT EXISTS keeps what is there");
  }

  private LanceTable created(Identifier table, TableInfo info) throws TableAlreadyExistsException {
    Map<String, String> options = options(table);
    ArrayNode named = PythonCalls.JSON.createArrayNode();
    info.properties()
        .forEach(
            (key, value) -> {
              if (property(key, value)) {
                options.put(key, value);
                // What is an option of the write that makes the table comes under both names.
                if (key.equalsIgnoreCase("path") || !info.properties().containsKey(OPTION_PREFIX + key)) {
                  named.add(key);
                }
              }
            });
    if (info.partitions().length > 1) {
      throw new UnsupportedOperationException(
          "a table is sharded by one column, not by " + Arrays.toString(info.partitions()));
    }
    for (Transform each : info.partitions()) {
      shard(each, options);
    }
    for (Constraint each : info.constraints()) {
      if (each instanceof PrimaryKey key) {
        // As JSON, because a name may have a comma.
        List<String> columns =
            Arrays.stream(key.columns()).map(column -> columnOf(column, info.schema())).toList();
        options.put("primaryKey", PythonCalls.JSON.valueToTree(columns).toString());
      } else {
        throw new UnsupportedOperationException("PRIMARY KEY is the only constraint that a table can have");
      }
    }
    ObjectNode arguments = PythonCalls.JSON.createObjectNode();
    arguments.put("schema", info.schema().json());
    arguments.set("properties", named);
    try {
      PythonCalls.ask("create", options, arguments);
      return load(table, options(table));
    } catch (PythonCalls.RefusedException refused) {
      if (refused.kind.equals("TableExistsError")) {
        throw new TableAlreadyExistsException(table);
      }
      return Refusals.shown(
          () -> {
            throw refused;
          });
    } catch (NoSuchTableException error) {
      throw Refusals.sneaky(error);
    }
  }

  /** Whether a property is an option of lancewal's, and not one that Spark adds. */
  private boolean property(String key, String value) {
    if (key.equals(PROP_LOCATION)) {
      String path = value.startsWith("file:/") ? value.replaceFirst("^file:/+", "/") : value;
      throw new UnsupportedOperationException(
          "LOCATION is not needed: name the table by its path, as " + name + ".`" + path + "`");
    }
    // Without USING some writers name the session's default.
    if (key.equals(PROP_PROVIDER)
        && !value.equalsIgnoreCase(PythonCalls.FORMAT)
        && !value.equalsIgnoreCase(SQLConf.get().defaultDataSourceName())) {
      throw new UnsupportedOperationException(
          "tables of " + name + " are lancewal's, not " + value + "'s; leave USING out");
    }
    return !SPARKS_OWN.contains(key) && !key.startsWith(OPTION_PREFIX);
  }

  /** The column that is meant, as the table spells it. Spark resolves no names of a PRIMARY KEY. */
  private static String columnOf(NamedReference named, StructType schema) {
    String asked = String.join(".", named.fieldNames());
    if (SQLConf.get().caseSensitiveAnalysis() || Arrays.asList(schema.fieldNames()).contains(asked)) {
      return asked;
    }
    return Arrays.stream(schema.fieldNames()).filter(asked::equalsIgnoreCase).findFirst().orElse(asked);
  }

  /** PARTITIONED BY (bucket(8, id)) or (tenant): how keys are divided into shards. */
  private static void shard(Transform transform, Map<String, String> options) {
    String column = null;
    for (Expression argument : transform.arguments()) {
      if (argument instanceof Literal) {
        options.put("numBuckets", String.valueOf(((Literal<?>) argument).value()));
      } else if (argument instanceof NamedReference) {
        if (column != null) {
          throw new UnsupportedOperationException("a table is sharded by one column, not by " + transform);
        }
        column = String.join(".", ((NamedReference) argument).fieldNames());
      }
    }
    switch (transform.name()) {
      case "bucket" -> options.put("bucketColumn", column);
      case "identity" -> options.put("identityColumn", column);
      default ->
          throw new UnsupportedOperationException(
              "a table is sharded by bucket(number, column) or by a column, not by " + transform);
    }
  }

  @Override
  public Table alterTable(Identifier table, TableChange... changes) {
    boolean ofColumns = Arrays.stream(changes).allMatch(TableChange.ColumnChange.class::isInstance);
    throw new UnsupportedOperationException(
        ofColumns
            ? "columns are changed with Lance itself, or with lancewal in Python"
            : "only columns of a table can be changed, with Lance itself; create another table and copy the rows");
  }

  @Override
  public boolean dropTable(Identifier table) {
    JsonNode dropped =
        Refusals.shown(
            () -> PythonCalls.ask("drop", options(table), PythonCalls.JSON.createObjectNode()));
    return dropped.get("dropped").asBoolean();
  }

  @Override
  public void renameTable(Identifier from, Identifier to) {
    throw new UnsupportedOperationException("a table is where its directory is; it cannot be renamed");
  }

  /** Also as {@code lance.system.compact}. */
  @Override
  public UnboundProcedure loadProcedure(Identifier procedure) {
    String[] namespace = procedure.namespace();
    boolean known = namespace.length == 0 || namespace.length == 1 && namespace[0].equalsIgnoreCase("system");
    return new Upkeep(this, known ? procedure.name().toLowerCase(Locale.ROOT) : procedure.toString());
  }

  @Override
  public Identifier[] listProcedures(String[] namespace) {
    return Upkeep.NAMES.stream().map(each -> Identifier.of(namespace, each)).toArray(Identifier[]::new);
  }

  /** The options of the table that a procedure names, as {@code namespace.table} or by its path. */
  Map<String, String> options(String named) {
    if (named.contains("/") && !named.contains("`")) {
      return options(Identifier.of(new String[0], named));
    }
    String[] parts =
        named.contains("`")
            ? CollectionConverters.asJava(CatalystSqlParser$.MODULE$.parseMultipartIdentifier(named))
                .toArray(String[]::new)
            : named.split("\\.");
    int first = parts.length > 1 && parts[0].equals(name) ? 1 : 0;
    return options(
        Identifier.of(Arrays.copyOfRange(parts, first, parts.length - 1), parts[parts.length - 1]));
  }

  private Map<String, String> options(Identifier table) {
    Map<String, String> options = new HashMap<>(settings);
    if (table.name().contains("/")) {
      options.put("path", table.name());
      return options;
    }
    if (root == null) {
      throw new IllegalArgumentException(
          "set spark.sql.catalog." + name + ".root to the directory of the tables, or name one by its path");
    }
    StringBuilder path = new StringBuilder(root);
    for (String part : table.namespace()) {
      path.append('/').append(part);
    }
    options.put("path", path.append('/').append(table.name()).toString());
    return options;
  }
}
